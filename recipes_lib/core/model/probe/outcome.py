"""What a model does with a few tokens, and the comparison of two outcomes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes_lib.core.model.causal_lm import decoder_blocks

TOKENS = 16  # of each of two rows
# What the order of sums may change: of the largest number of a tensor.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
TOLERANCE_OF_16_BITS = 0.1
# Terms of a gradient cancel. A CPU that adds up the 49,152 products of a vocabulary one after the
# other moved one of a trained model by 4e-4, and 16 bits moved those of its keys by 0.15.
TOLERANCE_OF_GRADIENTS = {torch.float64: 1e-6, torch.float32: 1e-3}
TOLERANCE_OF_16_BIT_GRADIENTS = 0.3
TABLES_SEEN = 2**20  # numbers of each gradient that are compared


class Limits(NamedTuple):
    """A promise, and how far numbers may be off."""

    promise: str
    bound: float | None = None
    loss_bound: float | None = None

    def of(self, name: str, dtype: torch.dtype) -> float:
        """How far two outcomes may differ in this number."""
        if self.promise == "changes":
            return float("inf")
        if name == "loss" and self.loss_bound is not None:
            return self.loss_bound
        if self.bound is not None:
            return self.bound
        if name.startswith("gradient"):
            return TOLERANCE_OF_GRADIENTS.get(dtype, TOLERANCE_OF_16_BIT_GRADIENTS)
        return TOLERANCE.get(dtype, TOLERANCE_OF_16_BITS)


# --- what a model does with a few tokens ----------------------------------------------------------


def words_of(model: Any) -> int:
    """How many tokens of the vocabulary an outcome uses."""
    return min(model.config.get_text_config().vocab_size, 997)


def row_of(model: Any) -> dict[str, Tensor | bool]:
    """For an outcome: two rows of tokens with padding behind the second."""
    count = torch.arange(2 * TOKENS, device=model.device).view(2, -1)
    ids = (count * 7 + 3) % words_of(model)
    mask = (count < 2 * TOKENS - TOKENS // 3).long()
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask, "use_cache": False}


def outcome(
    model: Any, *, promise: str, autocast: torch.dtype | None = None
) -> dict[str, Tensor | None]:
    """The loss, the logits of what is no padding, and gradients; those of both ends are enough."""
    # Without a dtype it is off, also where a user has it on: limits are those of the model's own.
    with torch.autocast(model.device.type, autocast, enabled=autocast is not None):
        return _loss_logits_and_gradients(model, promise)


def _loss_logits_and_gradients(model: Any, promise: str) -> dict[str, Tensor | None]:
    """The outcome by name: loss, logits, gradients of two rows; none where weights are rounded."""
    row = row_of(model)
    if promise == "rounds":
        with undisturbed(model, training=False):
            return _loss_and_logits(model, row)[0]
    wanted = watched(model, promise)
    with undisturbed(model, training=True):
        found, loss = _loss_and_logits(model, row)
        if not wanted:
            return found
        gradients = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        for name, gradient in zip(wanted, gradients):
            found[f"gradient of {name}"] = None if gradient is None else thinned(gradient)
    return found


def _loss_and_logits(model: Any, row: dict) -> tuple[dict[str, Tensor | None], Tensor]:
    """The outcome of a row: its loss, and the logits of what is no padding."""
    out = model(**row)
    found = {"loss": out.loss.detach()}
    if out.logits is not None:  # a loss in chunks makes none
        found["logits"] = out.logits.detach()[row["attention_mask"] > 0]
    return found, out.loss


def watched(model: Any, promise: str) -> dict[str, nn.Parameter]:
    """An outcome's gradients: first and last block and outside of them; of adapters, all."""
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
    """Every n-th row of an outcome's tensor: a million numbers, of all heads and channels."""
    return gradient[:: max(1, gradient.numel() // TABLES_SEEN)].clone()


@contextlib.contextmanager
def undisturbed(model: Any, *, training: bool) -> Iterator[None]:
    """For an outcome: no dropout, nothing compiled; modes, buffers, random states come back."""
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
    dead = _not_finite_or_missing(new, gradients, limits.promise)
    if dead:
        return dead
    sizes = [size(value).item() for value in gradients.values() if value is not None]
    top = max(sizes, default=0.0)
    if sizes and top == 0:
        return "no gradient arrives"
    off = {}
    for name in _names_to_compare(old, new, limits.promise):
        before = as_comparable_numbers(old[name])
        after = as_comparable_numbers(new[name])
        # A gradient that is small beside the others may be off by a share of theirs.
        least = top / 100 if name in gradients else 1e-30
        off[name] = (size(before - after) / max(size(before).item(), least)).item()
    if limits.promise in ("rounds", "changes") and max(off.values()) == 0:
        return "no number has changed"
    for name, share in off.items():
        if share > limits.of(name, dtype):
            return f"the {name} is off by {share:.1e}"
    return None


def _not_finite_or_missing(new: dict, gradients: dict, promise: str) -> str | None:
    """In an outcome: a number that is none, or an adapter that learns nothing."""
    for name, value in new.items():
        if value is not None and not value.isfinite().all():
            return f"the {name} is not finite"
    if promise == "grows":
        for name, value in gradients.items():
            if value is None:
                return f"no {name} arrives"
    return None


def _names_to_compare(old: dict, new: dict, promise: str) -> list[str]:
    """What two outcomes are compared by: all of it, or the loss and the logits."""
    names = [name for name in old if name in new]
    if promise in ("exact", "function"):
        return names
    return [name for name in names if name in ("loss", "logits")]


def as_comparable_numbers(value: Tensor | None) -> Tensor:
    if value is None:  # what gets no gradient has one of zeros
        return torch.zeros(1)
    return value if value.dtype == torch.float64 else value.float()


def precision_of(model: Any) -> torch.dtype:
    """The dtype whose rounding an outcome has: layers in four bits may compute in bf16."""
    if any(getattr(weight, "quant_state", None) is not None for weight in model.parameters()):
        return torch.bfloat16
    return model.dtype


def largest(value: Tensor) -> Tensor:
    return abs(value).max()
