"""The loss of a causal LM as a sum over the tokens that have a target.

    tokens     The   cat   sat   .
    labels      -    cat   sat   .      each at its own token, and IGNORED (-) without a loss
    targets    cat   sat    .    -      each where it is predicted: one place to the left

A sum, because micro-batches, chunks and ranks have unequal numbers of targets. Only a sum that is
divided by the targets of all of them gives every token the same weight.

Shapes: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn import functional as F

from recipes_lib.core.data.tokens_and_labels import IGNORED
from recipes_lib.core.model.causal_lm import without_adapters


def next_tokens(labels: torch.Tensor, *, ignored: int = IGNORED) -> torch.Tensor:
    """The targets [..., S] of a loss, from unshifted labels; the last position has none."""
    return F.pad(labels[..., 1:], (0, 1), value=ignored)


def count_targets(labels: torch.Tensor) -> torch.Tensor:
    """How many of unshifted labels [B, S] have a loss. Nothing predicts the first of a row."""
    return (labels[:, 1:] != IGNORED).sum()


def sum_of_losses(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The sum of the cross-entropy over the targets of `batch`; its labels [B, S] are unshifted.

    It is computed here, from the logits: some models ignore the Trainer's `num_items_in_batch`.
    `model` is a causal LM, or a wrapper around one.
    """
    require_shifted_loss(model)
    # Without labels: the model would compute a loss of its own, and its logits in fp32 with it.
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    output = model(**inputs | {"use_cache": False})
    refuse_auxiliary_loss(output)
    logits = at_least_fp32(output.logits).flatten(0, 1)  # [B*S, V]
    del output  # 16-bit logits are free now: the loss keeps what it needs
    targets = next_tokens(batch["labels"]).flatten()  # [B*S]
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def at_least_fp32(logits: torch.Tensor) -> torch.Tensor:
    """Logits in a dtype that a loss can be computed in: 16 bits become fp32, fp64 stays."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


# --- models with another loss ---------------------------------------------------------------------


def refuse_auxiliary_loss(output: Any) -> None:
    """A mixture of experts adds the loss of its router to the one that it computes itself."""
    if getattr(output, "aux_loss", None) is not None:
        raise ValueError(
            "the router's auxiliary loss would be left out: set config.output_router_logits = False"
        )


def require_shifted_loss(model: Any) -> None:
    """Raise ValueError for a Hugging Face model whose own loss does not move the labels by one.

    The decoders of encoder-decoder models (Bart, Whisper) expect labels that are moved already.
    """
    from transformers import PreTrainedModel

    causal = without_adapters(getattr(model, "module", model))
    if not isinstance(causal, PreTrainedModel):
        return
    code = inspect.unwrap(type(causal).forward).__code__
    moves_them_itself = any("shift" in name for name in code.co_varnames)
    if "loss_function" not in code.co_names and not moves_them_itself:
        raise ValueError(
            f"{type(causal).__name__} computes its loss itself, from labels that are moved "
            f"already: give a model whose loss moves them, as ForCausalLMLoss does"
        )
