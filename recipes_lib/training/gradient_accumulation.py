"""Gradient accumulation: a large effective batch in the memory of a small one.

Problem    Activations and logits grow with the batch, and the batch that trains well does not fit.
Idea       Split the batch, add up the gradients, step once:

               full batch     L = sum over all tokens of CE / N          N = target tokens of the batch
               micro-batch i  L_i = sum over its tokens of CE / N        the same N, so  dL = sum_i dL_i

           The popular bug divides each micro-batch by its *own* token count and then by the number of
           micro-batches: with unequal lengths a token in a short micro-batch then weighs more.
Saves      (1 - 1/k) of activations and loss for k micro-batches; 2-16x the batch at flat memory.
Costs      Gradients stay alive between micro-batches, so gradient memory adds to activation memory;
           small micro-batches use the device less well.
Use when   The effective batch you want does not fit. Not when it fits: k = 1 is faster; and not together
           with an optimizer step in backward, which leaves nothing to accumulate.
In production   `TrainingArguments(gradient_accumulation_steps=k)`: the Trainer passes the model the same
           `num_items_in_batch`; under FSDP or DDP it also skips the reduction of all but the last micro-batch.
Source     "Fixing Gradient Accumulation", Hugging Face blog, October 2024.

Shapes: B batch, S sequence, k micro-batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from recipes_lib.core.budget import Budget
from recipes_lib.core.data import IGNORED

Batch = dict[str, torch.Tensor]


def cross_entropy_sum(model: Any, batch: Batch) -> torch.Tensor:
    """The sum of the cross-entropy over the targets of `batch`: labels [B, S], not shifted, IGNORED for no loss.

    Computed here, from the logits: some models ignore the Trainer's `num_items_in_batch` and would be wrong by k.
    """
    # The model predicts token t+1 from token t, so the labels move one to the left.
    shifted = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)  # [B, S]
    output = model(
        **{name: tensor for name, tensor in batch.items() if name != "labels"}, use_cache=False
    )
    if getattr(output, "aux_loss", None) is not None:
        raise ValueError(
            "the router's auxiliary loss would be left out: set config.output_router_logits = False"
        )
    logits = output.logits.float().flatten(0, 1)  # [B*S, V]
    del output  # the loss keeps what it needs
    return torch.nn.functional.cross_entropy(
        logits, shifted.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def accumulate_gradients(
    model: Any,
    batch: Batch | Sequence[Batch],
    *,
    micro_batches: int | None = None,
    loss_sum: Callable[[Any, Batch], torch.Tensor] = cross_entropy_sum,
    autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
) -> torch.Tensor:
    """Add the gradient of the whole batch to `.grad`, one micro-batch in memory at a time.

    Args:
        batch: tensors [B, S] with `input_ids` and `labels` (IGNORED where there is no target), or a sequence of
            such batches, of any lengths, that make up the whole one.
        micro_batches: k, into which one batch is split; must divide B. Not for a sequence, which is split already.
        loss_sum: the sum of the losses of a micro-batch's targets.
        autocast: makes the context of each forward; backward: replaces `loss.backward()` (loss scaling).
    Returns the loss of the whole batch, a detached scalar: the mean cross-entropy over all its target tokens.
    Raises ValueError if k does not divide B, if no label is left to train on, or if the model adds a loss of its own.
    """
    micros = _split(batch, micro_batches)
    if len(micros) > 1 and any(getattr(p, "steps_in_backward", False) for p in model.parameters()):
        raise ValueError(
            "the optimizer steps in backward, so no gradient is left to accumulate: use one of the two"
        )
    targets = torch.stack([(micro["labels"][:, 1:] != IGNORED).sum() for micro in micros]).sum()
    if targets == 0:
        raise ValueError(f"every label is {IGNORED}: the batch has no token to train on")
    total = torch.zeros((), device=targets.device)
    for micro in micros:
        with autocast():
            loss = loss_sum(model, micro) / targets
        backward(loss)
        total += loss.detach()
    return total


def _split(batch: Batch | Sequence[Batch], micro_batches: int | None) -> list[Batch]:
    if (micro_batches is None) == isinstance(batch, dict) or not batch:
        raise ValueError(
            "give one batch and the number of micro_batches, or a sequence of micro-batches alone"
        )
    for part in [batch] if isinstance(batch, dict) else batch:
        if not {"input_ids", "labels"} <= part.keys():
            raise ValueError(f"the batch has {sorted(part)}: input_ids and labels are needed")
    if not isinstance(batch, dict):
        return list(batch)
    batch_size = batch["input_ids"].shape[0]
    if micro_batches < 1 or batch_size == 0 or batch_size % micro_batches:
        raise ValueError(
            f"micro_batches={micro_batches} must be 1 or more and divide the batch size {batch_size}"
        )
    return [
        {name: t.chunk(micro_batches)[i] for name, t in batch.items()} for i in range(micro_batches)
    ]


def estimate_gradient_accumulation(
    budget: Budget, model: Any, *, batch_size: int, seq_len: int, micro_batches: int
) -> Budget:
    """The budget of the full batch, split in k: activations and loss shrink, gradients are carried."""
    return split_budget(
        budget, model, batch_size=batch_size, seq_len=seq_len, micro_batches=micro_batches
    )
