"""Gradient accumulation: a large effective batch in the memory of a small one.

Problem    Activations and logits grow with the batch, and the batch that trains well does not fit.
Idea       Split the batch, add up the gradients, step once:

               full batch     L   = sum over all tokens of CE / N     N = targets of the batch
               micro-batch i  L_i = sum over its tokens of CE / N     the same N: dL = sum_i dL_i

           The popular bug divides each micro-batch by its *own* token count and then by k: with
           unequal lengths a token in a short micro-batch then weighs more.
Saves      (1 - 1/k) of activations and loss for k micro-batches; 2-16x the batch at flat memory.
Costs      Gradients stay alive between micro-batches, so gradient memory adds to activation memory;
           small micro-batches use the device less well.
Use when   The effective batch you want does not fit.
Not when   It fits: k = 1 is faster. Nor together with an optimizer step in backward, which leaves
           nothing to accumulate.
In production   `TrainingArguments(gradient_accumulation_steps=k)`: the Trainer passes the model the
           same `num_items_in_batch`; under FSDP or DDP it also skips the reduction of all but the
           last micro-batch.
Source     "Fixing Gradient Accumulation", Hugging Face blog, October 2024.

Shapes: B batch, S sequence, k micro-batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from recipes_lib.core.data import IGNORED, Batch
from recipes_lib.core.model.loss import (
    count_targets,
    refuse_auxiliary_loss,
    require_shifted_loss,
    sum_of_losses,
)
from recipes_lib.core.model.marks import STEPS_IN_BACKWARD, any_marked

# --- the idea: what a learner can copy ------------------------------------------------------------


def accumulated_by_hand(model: Any, batch: Batch, *, micro_batches: int) -> None:
    """Add the gradient of the mean loss over `batch` [B, S] to `.grad`, in `micro_batches` parts.

    The model's loss is a mean over the micro-batch's *own* targets. So it counts by their share in
    the targets of the whole batch.
    """
    targets = count_targets(batch["labels"])  # N, of the whole batch
    rows = torch.arange(len(batch["labels"]))
    for part in rows.chunk(micro_batches):
        micro = {name: tensor[part] for name, tensor in batch.items()}  # [B/k, S]
        mean = model(**micro, use_cache=False).loss
        share = count_targets(micro["labels"]) / targets
        (mean * share).backward()  # adds to what `.grad` holds already


# --- the technique --------------------------------------------------------------------------------


def own_loss_sum(model: Any, batch: Batch) -> torch.Tensor:
    """To accumulate: `sum_of_losses` from the loss of the model, a mean over its targets."""
    require_shifted_loss(model)
    output = model(**batch | {"use_cache": False})
    refuse_auxiliary_loss(output)
    return output.loss * count_targets(batch["labels"])


def accumulate_gradients(
    model: Any,
    batch: Batch | Sequence[Batch],
    *,
    micro_batches: int | None = None,
    loss_sum: Callable[[Any, Batch], torch.Tensor] = sum_of_losses,
    autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
) -> torch.Tensor:
    """Add the gradient of the whole batch to `.grad`, one micro-batch in memory at a time.

    Args:
        batch: tensors [B, S] with `input_ids` and `labels` (IGNORED where there is no target), or a
            sequence of such micro-batches, of any lengths. A batch is split by its rows. What has
            none goes to every micro-batch as it is: `position_ids` [1, S], and options.
        micro_batches: k, into which one batch is split; must divide B.
        loss_sum: the sum of the losses of a micro-batch's targets.
        autocast: makes the context of each forward.
        backward: replaces `loss.backward()` (loss scaling).
    Returns the loss of the whole batch, detached: the mean over all its targets.
    """
    micros = batch
    if isinstance(batch, Mapping):  # a tokenizer returns one that is no dict
        micros = split(batch, micro_batches)
    # With one micro-batch the first backward is the last, and an update in it is right.
    if len(micros) > 1 and any_marked(model.parameters(), STEPS_IN_BACKWARD):
        raise ValueError(
            "the optimizer steps in backward, so no gradient is left to accumulate: "
            "use one of the two"
        )
    # Counted before the first forward: every micro-batch is divided by the targets of all.
    targets = torch.stack([count_targets(micro["labels"]) for micro in micros]).sum()
    if targets == 0:
        raise ValueError(f"every label is {IGNORED}: the batch has no token to train on")
    total = torch.zeros((), device=targets.device)
    for micro in micros:
        with autocast():
            loss = loss_sum(model, micro) / targets
        backward(loss)  # frees this micro-batch's activations
        total = total + loss.detach()  # not `+=`: an fp64 loss keeps its digits
    return total


def split(batch: Batch, micro_batches: int | None) -> list[Batch]:
    """The k micro-batches [B/k, S] of a batch, to accumulate over."""
    rows = len(batch["input_ids"])
    if rows % micro_batches:
        raise ValueError(
            f"micro_batches={micro_batches}: give a number that divides the batch size {rows}"
        )
    size = rows // micro_batches
    micros = []
    for start in range(0, rows, size):
        micro = {}
        for name, value in batch.items():
            has_rows = isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == rows
            micro[name] = value[start : start + size] if has_rows else value
        micros.append(micro)
    return micros
