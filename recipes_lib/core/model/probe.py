"""A technique proves itself on the model that it is given, on a few tokens, or leaves it as it was.

    @proves("exact")
    def apply_something(model, *, option=1): ...

    apply_something(model)                 runs 16 tokens before and after, and compares
    apply_something(model, check=False)    trusts

What raises half-way, and what breaks its promise, is undone, and one `ValueError` says why. The
promises:

    exact      loss, logits and gradients as before, but for the order of sums
    function   the same, without the gradients of the tables (which were tied or untied)
    grows      loss and logits as before, and all that trains now gets a gradient (adapters)
    rounds     logits within `bound` of what they were, and not all the same
    changes    finite, alive, and not the same (heads pooled, angles slowed)

A pattern of attention has two more runs before its own: with `wide` options, as wide as the text,
it must be exact; with `narrow` ones it must change something. At a user's own sizes 16 tokens would
see neither.

What 16 tokens of one batch cannot see needs a guard of its own: what arrives later (padding on the
left, documents in a row, a filled cache), what fresh weights hide, what a word promises.

A model on "meta" or without data, and one in parts over ranks, is not probed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes_lib.core.model.causal_lm import decoder_blocks, is_causal_lm

TOKENS = 16  # of each of two rows
# What the order of sums may change: of the largest number of a tensor.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
TOLERANCE_OF_16_BITS = 0.1
TABLES_SEEN = 2**20  # numbers of each gradient that are compared


# --- the decorator --------------------------------------------------------------------------------


def proves(
    promise: str,
    *,
    bound: float | None = None,
    loss_bound: float | None = None,
    wide: Callable[[Any], dict] | None = None,
    narrow: Callable[[Any], dict] | None = None,
) -> Callable:
    """Let `apply(model, …)` prove itself on the model, unless it is called with `check=False`.

    Args:
        promise: "exact", "function", "grows", "rounds" or "changes".
        bound: how far logits and gradients may move, as a share; from the dtype if not given.
        loss_bound: the same for the loss alone, which 16 bits move less.
        wide, narrow: options of a pattern of attention for a model, as told above.
    """

    def decorate(apply: Callable) -> Callable:
        signature = inspect.signature(apply)

        @functools.wraps(apply)
        def wrapper(model: Any, *args: Any, check: bool = True, **options: Any) -> Any:
            signature.bind(model, *args, **options)  # a wrong name is Python's own TypeError
            limits = Limits(promise, bound, loss_bound)
            if not check or not can_be_probed(model):
                with undone_on_error(model, apply.__name__):
                    return apply(model, *args, **options)
            if wide is not None:
                pattern = options | wide(model)
                _prove(apply, model, args, pattern, Limits("exact", bound, loss_bound), keep=False)
            if narrow is not None:
                pattern = options | narrow(model)
                _prove(apply, model, args, pattern, Limits("changes", None, None), keep=False)
                with undone_on_error(model, apply.__name__):
                    return apply(model, *args, **options)
            return _prove(apply, model, args, options, limits, keep=True)

        flag = inspect.Parameter(
            "check", inspect.Parameter.KEYWORD_ONLY, default=True, annotation="bool"
        )
        parameters = [*signature.parameters.values(), flag]
        parameters.sort(key=lambda parameter: parameter.kind)
        wrapper.__signature__ = signature.replace(parameters=parameters)
        return wrapper

    return decorate


class Limits:
    """A promise, and how far numbers may be off."""

    def __init__(self, promise: str, bound: float | None, loss_bound: float | None):
        self.promise = promise
        self.bound = bound
        self.loss_bound = loss_bound

    def of(self, name: str, dtype: torch.dtype) -> float:
        if self.promise == "changes":
            return float("inf")
        if name == "loss" and self.loss_bound is not None:
            return self.loss_bound
        if self.bound is not None:
            return self.bound
        return TOLERANCE.get(dtype, TOLERANCE_OF_16_BITS)


def _prove(
    apply: Callable, model: Any, args: tuple, options: dict, limits: Limits, *, keep: bool
) -> Any:
    """Apply, compare, and undo: after an error always, and else unless the change is to be kept."""
    before = [outcome(model, row, limits.promise) for row in rows_of(model, limits.promise)]
    shared = shared_between_blocks(model)
    snapshot = Snapshot(model)
    with undone_on_error(model, apply.__name__, snapshot):
        changed = apply(model, *args, **options)
        problem = _broken(model, changed, before, snapshot, limits)
        if shared_between_blocks(changed) != shared:
            problem = "blocks that shared a weight no longer do"
        if problem:
            raise ValueError(problem)
    if not keep:
        snapshot.restore()
    return changed


def _broken(
    model: Any, changed: Any, before: list[dict], snapshot: Snapshot, limits: Limits
) -> str | None:
    """What is not as promised, in a few words; None if all is."""
    if changed is model and not snapshot.differs():
        return "nothing in the model has changed"
    for row, expected in zip(rows_of(changed, limits.promise), before):
        got = outcome(changed, row, limits.promise)
        problem = difference(expected, got, limits, changed.dtype)
        if problem:
            return problem
    return None


@contextlib.contextmanager
def undone_on_error(model: Any, name: str, snapshot: Snapshot | None = None) -> Iterator[None]:
    """Give `model` everything back that it had if the body raises, with one sentence why."""
    if snapshot is None:
        snapshot = Snapshot(model)
    try:
        yield
    except BaseException as error:
        snapshot.restore()
        if not isinstance(error, Exception):
            raise
        reason = str(error)
        if not isinstance(error, ValueError):
            reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{type(model).__name__} cannot have {name}, and is as it was: {reason}"
        ) from error


def can_be_probed(model: Any) -> bool:
    """Whether all weights are here, with data: not on "meta", without data, or in parts.

    What is no causal LM is not probed either: `apply` says so in its own words.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.distributed.tensor import DTensor

    if torch.is_inference_mode_enabled() or not is_causal_lm(model):
        return False
    weights = [*model.parameters(), *model.buffers()]
    return not any(weight.is_meta or isinstance(weight, FakeTensor | DTensor) for weight in weights)


# --- what a model does with a few tokens ----------------------------------------------------------


def rows_of(model: Any, promise: str) -> list[dict]:
    """Two rows of tokens with padding behind the second; a pattern also gets them without."""
    count = torch.arange(2 * TOKENS, device=model.device).view(2, -1)
    words = min(model.config.get_text_config().vocab_size, 997)
    ids = (count * 7 + 3) % words
    mask = (count < 2 * TOKENS - TOKENS // 3).long()
    labels = ids.masked_fill(mask == 0, -100)
    padded = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    if promise == "changes":
        return [{"input_ids": ids, "labels": ids}, padded]
    return [padded]


def outcome(model: Any, row: dict, promise: str) -> dict[str, Tensor | None]:
    """The loss, the logits of what is no padding, and gradients; those of both ends are enough."""
    if promise == "rounds":
        with undisturbed(model, training=False):
            return _forward(model, row)[0]
    wanted = watched(model, promise)
    with undisturbed(model, training=True):
        found, loss = _forward(model, row)
        if not wanted:
            return found
        gradients = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        for name, gradient in zip(wanted, gradients):
            found[f"gradient of {name}"] = None if gradient is None else thinned(gradient)
    return found


def _forward(model: Any, row: dict) -> tuple[dict[str, Tensor | None], Tensor]:
    out = model(**row)
    found = {"loss": out.loss.detach()}
    if out.logits is not None:  # a loss in chunks makes none
        is_text = row.get("attention_mask", row["input_ids"] + 1) > 0
        found["logits"] = out.logits.detach()[is_text]
    return found, out.loss


def watched(model: Any, promise: str) -> dict[str, nn.Parameter]:
    """What trains in the first and the last block and outside of them; of adapters, all."""
    left_out = set()
    if promise != "grows":
        for block in decoder_blocks(model)[1:-1]:
            left_out |= {id(parameter) for parameter in block.parameters()}
    if promise == "function":
        tables = [model.get_input_embeddings(), model.get_output_embeddings()]
        left_out |= {id(table.weight) for table in tables}
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return {name: parameter for name, parameter in trained if id(parameter) not in left_out}


def thinned(gradient: Tensor) -> Tensor:
    """Every n-th row: a million numbers of a tensor are enough, from all heads and channels."""
    return gradient[:: max(1, gradient.numel() // TABLES_SEEN)].clone()


@contextlib.contextmanager
def undisturbed(model: Any, *, training: bool) -> Iterator[None]:
    """No dropout, nothing compiled; modes, buffers and random states come back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer._version, buffer.clone()) for buffer in model.buffers()]
    devices = [model.device] if model.device.type == "cuda" else []
    # Not by a TorchFunctionMode: it is off while autograd recomputes a checkpoint.
    without_dropout = patch.object(F, "dropout", lambda x, *_, **__: x)
    attention = patch.object(F, "scaled_dot_product_attention", _attention_without_dropout())
    eager = torch.compiler.set_stance("force_eager")
    with torch.random.fork_rng(devices), eager, torch.set_grad_enabled(training):
        torch.manual_seed(0)
        for module, _ in modes:
            module.training = training  # not model.train(), which some families overwrite
        try:
            with without_dropout, attention:
                yield
        finally:
            for module, mode in modes:
                module.training = mode
            for buffer, version, value in buffers:
                if buffer._version != version:
                    buffer.data.copy_(value)


def _attention_without_dropout() -> Callable:
    real = F.scaled_dot_product_attention

    @functools.wraps(real)
    def attention(q, k, v, attn_mask=None, dropout_p=0.0, *args, **kwargs):
        return real(q, k, v, attn_mask, 0.0, *args, **kwargs)

    return attention


# --- the comparison -------------------------------------------------------------------------------


def difference(old: dict, new: dict, limits: Limits, dtype: torch.dtype) -> str | None:
    """What of two outcomes is not as promised, in a few words; None if all is."""
    size = torch.linalg.vector_norm if limits.promise == "rounds" else largest
    gradients = {name: value for name, value in new.items() if name.startswith("gradient")}
    dead = _dead(new, gradients, limits.promise)
    if dead:
        return dead
    sizes = [size(value).item() for value in gradients.values() if value is not None]
    top = max(sizes, default=0.0)
    if sizes and top == 0:
        return "no gradient arrives"
    off = {}
    for name in _compared(old, new, limits.promise):
        before, after = as_numbers(old[name]), as_numbers(new[name])
        # A gradient that is small beside the others may be off by a share of theirs.
        least = top / 100 if name in gradients else 1e-30
        off[name] = (size(before - after) / max(size(before).item(), least)).item()
    if limits.promise in ("rounds", "changes") and max(off.values()) == 0:
        return "no number has changed"
    for name, share in off.items():
        if share > limits.of(name, dtype):
            return f"the {name} is off by {share:.1e}"
    return None


def _dead(new: dict, gradients: dict, promise: str) -> str | None:
    for name, value in new.items():
        if value is not None and not value.isfinite().all():
            return f"the {name} is not finite"
    if promise == "grows":
        for name, value in gradients.items():
            if value is None:
                return f"no {name} arrives"
    return None


def _compared(old: dict, new: dict, promise: str) -> list[str]:
    names = [name for name in old if name in new]
    if promise in ("exact", "function"):
        return names
    return [name for name in names if name in ("loss", "logits")]


def as_numbers(value: Tensor | None) -> Tensor:
    if value is None:  # what gets no gradient has one of zeros
        return torch.zeros(1)
    return value if value.dtype == torch.float64 else value.float()


def largest(value: Tensor) -> Tensor:
    return abs(value).max()


def shared_between_blocks(model: Any) -> int:
    """How many weights belong to several blocks."""
    owners: dict[int, set[int]] = {}
    for index, block in enumerate(decoder_blocks(model)):
        for parameter in block.parameters():
            owners.setdefault(id(parameter), set()).add(index)
    return sum(len(blocks) > 1 for blocks in owners.values())


# --- the undo -------------------------------------------------------------------------------------


class Snapshot:
    """All that modules, parameters and configurations refer to; no copy of a weight.

    A weight that is changed in place is not given back.
    """

    def __init__(self, model: Any):
        configs = {}
        for module in model.modules():
            config = vars(module).get("config")
            if config is not None:
                configs[id(config)] = config
        self.things = [*model.modules(), *model.parameters(), *configs.values()]
        self.kept = []
        self.held = []
        for thing in self.things:
            trains = getattr(thing, "requires_grad", None)
            self.kept.append((thing, type(thing), dict(vars(thing)), trains))
            for value in vars(thing).values():
                if isinstance(value, dict | list | set):
                    self.held.append((value, copy.copy(value)))
        self.first_look = self.look()

    def restore(self) -> None:
        for thing, kind, attributes, trains in self.kept:
            thing.__class__ = kind
            vars(thing).clear()
            vars(thing).update(attributes)
            if isinstance(thing, nn.Parameter):
                thing.requires_grad_(trains)
        # In place: the handles of hooks hold on to the dictionary.
        for value, content in self.held:
            value.clear()
            if isinstance(value, list):
                value.extend(content)
            else:
                value.update(content)

    def differs(self) -> bool:
        return self.look() != self.first_look

    def look(self) -> list:
        """Classes, and the identity of everything that things refer to."""
        seen: list = [type(thing) for thing in self.things]
        for thing in self.things:
            for value in vars(thing).values():
                seen.append(id(value))
                if isinstance(value, dict):
                    seen += [id(inner) for inner in value.values()]
        return seen
