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

At a user's own options 16 tokens may see nothing: a tile of 1,024 tokens is one tile, a window of
512 hides none. So other options can stand in while it proves itself (`tried_with`).

A pattern of attention (`narrow`) is tried twice: as wide as the text it must be exact, and narrow
it must change something. If two documents in a row then still read each other, which is the model's
doing, the model refuses positions that restart.

What 16 tokens of one batch cannot see needs a guard of its own: what arrives later (padding on the
left, a filled cache), what fresh weights hide, what a word promises.

Before all this, what is no causal LM is refused. A model on "meta" or without data, and one in
parts over ranks, is not probed.

outcome    what a model does with a few tokens, and the comparison of two outcomes
leak_between_documents  whether two documents in a row read each other
undo       gives a model back all that it had
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from recipes_lib.core.model.causal_lm import (
    FULL_ATTENTIONS,
    decoder_blocks,
    is_causal_lm,
    require_causal_lm,
)
from recipes_lib.core.model.one_document import require_one_document
from recipes_lib.core.model.probe.leak_between_documents import documents_leak
from recipes_lib.core.model.probe.outcome import (
    TOKENS,
    Limits,
    difference,
    outcome,
    precision_of,
)
from recipes_lib.core.model.probe.undo import Snapshot, restored, undone_on_error

__all__ = ["TOKENS", "Limits", "can_be_probed", "proves"]

Options = dict[str, Any] | Callable[[Any], dict[str, Any]]  # as they are, or for a model


def proves(
    promise: str | Callable[..., Limits],
    *,
    bound: float | None = None,
    loss_bound: float | None = None,
    tried_with: Options | None = None,
    narrow: Options | None = None,
    kernel: bool = False,
    autocast: str | None = None,
    causal_lm: bool = True,
) -> Callable:
    """Let `apply(model, …)` prove itself on the model, unless it is called with `check=False`.

    Args:
        promise: "exact", "function", "grows", "rounds" or "changes"; or what makes the `Limits` of
            the options, where they decide it.
        bound: how far logits and gradients may move, as a share; from the dtype if not given.
        loss_bound: the same for the loss alone, which 16 bits move less.
        tried_with: options in place of the user's while it proves itself.
        narrow: options of a pattern of attention under which something must change.
        kernel: whether the attention that the configuration names must have been called.
        autocast: the option that names the dtype of autocast in which the model will train.
        causal_lm: whether only a causal LM is let in. Others ask for what they take themselves.
    """

    def decorate(apply: Callable) -> Callable:
        """From now on `apply` proves itself on each model."""
        signature = inspect.signature(apply)

        @functools.wraps(apply)
        def wrapper(model: Any, *args: Any, check: bool = True, **options: Any) -> Any:
            """Apply inside of a proof, and undo what breaks the promise."""
            signature.bind(model, *args, **options)  # a wrong name is Python's own TypeError
            if causal_lm:
                require_causal_lm(model)
            if not check or not can_be_probed(model):
                with undone_on_error(model, apply.__name__):
                    return apply(model, *args, **options)
            limits = promise(**options) if callable(promise) else Limits(promise, bound, loss_bound)
            prove = functools.partial(Proof, model, apply, args, limits, kernel)
            if tried_with is None:
                return prove(options.get(autocast)).of(options)
            with restored(model):
                if narrow is not None:
                    give_full_attention(model)
                proof = prove(options.get(autocast))
                proof.of(options | _for_model(tried_with, model), keep=False)
                if narrow is not None:
                    proof.limits = Limits("changes")
                    proof.of(options | _for_model(narrow, model), keep=False)
            with undone_on_error(model, apply.__name__):
                changed = apply(model, *args, **options)
                if narrow is not None and documents_leak(changed):
                    require_one_document(changed)
            return changed

        flag = inspect.Parameter(
            "check", inspect.Parameter.KEYWORD_ONLY, default=True, annotation="bool"
        )
        parameters = [*signature.parameters.values(), flag]
        parameters.sort(key=lambda parameter: parameter.kind)
        wrapper.__signature__ = signature.replace(parameters=parameters)
        return wrapper

    return decorate


def _for_model(options: Options, model: Any) -> dict[str, Any]:
    return options(model) if callable(options) else options


def give_full_attention(model: Any) -> None:
    """For a proof: a pattern is tried beside full attention, also in place of another pattern."""
    now = str(model.config.get_text_config()._attn_implementation)
    if not any(part in now for part in FULL_ATTENTIONS):
        model.set_attn_implementation("eager")


def can_be_probed(model: Any) -> bool:
    """Whether all weights of a causal LM are here: not on "meta", without data, or in parts."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.distributed.tensor import DTensor

    if torch.is_inference_mode_enabled() or not is_causal_lm(model):
        return False
    weights = [*model.parameters(), *model.buffers()]
    return not any(weight.is_meta or isinstance(weight, FakeTensor | DTensor) for weight in weights)


class Proof:
    """What a model did before, beside which each way to apply a technique is held."""

    def __init__(
        self,
        model: Any,
        apply: Callable,
        args: tuple,
        limits: Limits,
        kernel: bool,
        autocast: torch.dtype | None,
    ):
        """What is to be proven: that `apply` keeps what it promises, on this model."""
        self.model = model
        self.apply = apply
        self.args = args
        self.limits = limits
        self.kernel = kernel
        self.dtype = autocast
        self.shared = shared_between_blocks(model)
        try:
            self.before = outcome(model, promise=self.limits.promise, autocast=self.dtype)
        except Exception as error:
            raise ValueError(
                f"{type(model).__name__} fails on {TOKENS} tokens before anything has changed, so "
                f"nothing can be compared ({_one_line(error)}): check=False trusts"
            ) from error

    def of(self, options: dict[str, Any], *, keep: bool = True) -> Any:
        """Apply, compare, and undo: after an error always, else unless it is to be kept."""
        snapshot = Snapshot(self.model)
        with undone_on_error(self.model, self.apply.__name__, snapshot):
            changed = self.apply(self.model, *self.args, **options)
            problem = self._broken_promise(changed, snapshot)
            if problem:
                raise ValueError(problem)
        if not keep:
            snapshot.restore()
        return changed

    def _broken_promise(self, changed: Any, snapshot: Snapshot) -> str | None:
        """What the proof finds other than promised, in a few words; None if all is well."""
        if changed is self.model and not snapshot.differs():
            return "nothing in the model has changed"
        # Rounded weights are no parameters any more, shared or not.
        rounds = self.limits.promise == "rounds"
        if not rounds and shared_between_blocks(changed) != self.shared:
            return "blocks that shared a weight no longer do"
        with counted_attention(changed) as calls:
            got = outcome(changed, promise=self.limits.promise, autocast=self.dtype)
        if self.kernel and not calls:
            return "no layer calls the attention that it names"
        return difference(self.before, got, self.limits, self.dtype or precision_of(changed))


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def shared_between_blocks(model: Any) -> int:
    """For a proof: how many weights belong to several blocks."""
    owners: dict[int, set[int]] = {}
    for index, block in enumerate(decoder_blocks(model)):
        for parameter in block.parameters():
            owners.setdefault(id(parameter), set()).add(index)
    return sum(len(blocks) > 1 for blocks in owners.values())


@contextlib.contextmanager
def counted_attention(model: Any) -> Iterator[list[str]]:
    """For a proof: the name of the model's attention, once for each call of it inside."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    calls: list[str] = []
    name = model.config.get_text_config()._attn_implementation
    real = ALL_ATTENTION_FUNCTIONS.get(name)
    if real is None:  # "eager" stands in each model's own file
        yield calls
        return

    @functools.wraps(real)
    def counted(*args: Any, **options: Any) -> Any:
        calls.append(name)
        if "dropout" in options:
            options["dropout"] = 0.0
        return real(*args, **options)

    AttentionInterface.register(name, counted)
    try:
        yield calls
    finally:
        AttentionInterface.register(name, real)
