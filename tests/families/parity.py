"""What "equal" and "refused" mean for a technique on a family, and the references of a family.

A technique gets a copy of a tiny model and has four ways to end:

    equal       loss and gradients, or logits, are those of the reference
    refused     a ValueError of the package in one sentence, and the model is as it was
    no causal   the sentence says that the model is no causal LM
    untested    transformers itself fails on the reference: nothing can be compared

Everything else is a defect of the package: another loss, and any other error.
"""

from __future__ import annotations

import contextlib
import copy
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recipes_lib.core.model.causal_lm import without_adapters
from tests.families.configs import VOCABULARY, quiet, tiny_model
from tests.snapshots import assert_unchanged, snapshot

ROWS = 2
LENGTH = 24
Results = dict[str, Tensor]


class Outcome(NamedTuple):
    """How a technique ended on a family: "equal", "refused", "untested", "wrong" or "crash"."""

    kind: str
    text: str = ""


class Refused(Exception):
    """The package said no, in the sentence that this holds."""


class Untested(Exception):
    """transformers cannot make the reference."""


class Wrong(Exception):
    """Other numbers than the reference has."""


class Family:
    """The models of a family, all with the same weights, and what the plain ones compute."""

    def __init__(self, name: str) -> None:
        self.name = name
        with quiet():
            self._model = tiny_model(name)
        self._references: dict[str, Results] = {}

    def model(self) -> Any:
        """A new copy, in training mode, with the attention that transformers chooses."""
        return copy.deepcopy(self._model).train()

    def eager(self) -> Any:
        """A new copy whose attention is written out, with all its scores."""
        model = self.model()
        with reference():
            model.set_attn_implementation("eager")
        return model

    def reference(self) -> Results:
        """Loss and gradients of the eager model on the padded batch."""
        if "padded" not in self._references:
            with reference():
                self._references["padded"] = step(self.eager(), padded_batch())
        return self._references["padded"]


@contextlib.contextmanager
def reference() -> Iterator[None]:
    """What fails in here is no fault of the package."""
    try:
        yield
    except (Refused, Untested, Wrong):
        raise
    except Exception as error:
        raise Untested(f"{type(error).__name__}: {one_line(error)}") from error


def padded_batch() -> dict[str, Tensor]:
    """Tokens [B, S], of which the second row ends early."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 17:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :2] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def full_batch() -> dict[str, Tensor]:
    """Tokens [B, S] and labels, without padding and without a mask."""
    batch = padded_batch()
    return {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}


def step(model: Any, batch: dict[str, Tensor], **options: Any) -> Results:
    """Loss and gradients of one forward and backward; names are those without adapters."""
    loss = model(**batch, **{"use_cache": False} | options).loss
    loss.backward()
    return {"loss": loss.detach()} | gradients(model)


def gradients(model: Any) -> Results:
    found = without_adapters(model).named_parameters()
    return {name: p.grad.clone() for name, p in found if p.grad is not None}


def require_same(got: Results, expected: Results, *, tolerance: float = 2e-4) -> None:
    """Each tensor in the Euclidean norm, relative to its own size.

    Beside that counts what rounding leaves of a gradient that is zero: 1e-6 of the largest one.
    """
    missing = [name for name in expected if name not in got and expected[name].abs().max() > 0]
    if missing:
        raise Wrong(f"no {missing[0]}")
    others = {name: value for name, value in expected.items() if name != "loss"}
    floor = 1e-6 * max([float(value.norm()) for value in others.values()], default=0.0)
    for name, value in got.items():
        wanted = expected.get(name)
        if wanted is None:
            wanted = torch.zeros_like(value)
        if wanted.shape != value.shape:
            raise Wrong(f"{name} is {[*value.shape]}, not {[*wanted.shape]}")
        difference = float((value.float() - wanted.float()).norm())
        allowed = tolerance * float(wanted.float().norm()) + floor
        if not difference <= allowed:  # NaN is not
            raise Wrong(f"{name} differs by {difference:.2g} of {float(wanted.norm()):.2g}")


def apply(function: Callable[..., Any], model: Any, *args: Any, **options: Any) -> Any:
    """`function(model, …)`; if it refuses, the model has to be as it was."""
    before = snapshot(model)
    config = str(model.config)
    try:
        return function(model, *args, **options)
    except Exception as error:
        if is_refusal(error):
            assert_unchanged(model, before)
            if str(model.config) != config:
                raise Wrong("refused, and the configuration has changed") from error
        raise


def is_refusal(error: BaseException) -> bool:
    """Whether the package raised it, as ValueError in one line, and not something below."""
    frames = traceback.extract_tb(error.__traceback__)
    in_package = "/recipes_lib/" in frames[-1].filename
    # check_document_mask is a test of the model, and says so with RuntimeError.
    of_our_kind = isinstance(error, ValueError) or type(error) is RuntimeError
    return in_package and of_our_kind and "\n" not in str(error)


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def outcome(family: Family, technique: Callable[[Family], None]) -> Outcome:
    """Run a technique on a family, and say how it ended."""
    torch.manual_seed(0)
    try:
        with quiet():
            technique(family)
    except Untested as error:
        return Outcome("untested", str(error))
    except Wrong as error:
        return Outcome("wrong", str(error))
    except AssertionError as error:
        return Outcome("wrong", f"refused, and the model has changed: {one_line(error)}")
    except Exception as error:
        if is_refusal(error):
            return Outcome("refused", one_line(error))
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
        return Outcome("crash", f"{type(error).__name__}: {one_line(error)} ({place})")
    return Outcome("equal")
