"""One optimizer step on rows that are spread over ranks: every token weighs the same.

Rows have unequal numbers of tokens that count, and the wrappers of PyTorch average the gradients of
the ranks. So the loss of a rank is not the mean over its own tokens:

    the whole batch   L   = sum over all tokens of CE / T        T = tokens of all ranks
    rank r            L_r = sum over its tokens of CE * N / T    the same T, N ranks
    the average       (1 / N) * sum over r of L_r = L            and likewise the gradients

A mean over the rank's own tokens would give those of short rows more weight, without an error.

With several micro-batches the ranks have to talk only once, after the last of them. DDP decides
that in the *forward*, so the forward belongs into `no_sync` as well as the backward. What a sharded
model gains is lost meanwhile: until the last micro-batch each rank holds gradients of the whole
model. `reduce_each` averages them in every micro-batch, and they stay sharded.

Shapes: B rows of this rank, S sequence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from recipes_lib.core.data import IGNORED, Batch
from recipes_lib.core.model.loss import count_targets, sum_of_losses
from recipes_lib.core.ranks import group_device, rank, world_size
from recipes_lib.core.ranks.collectives import sums_over_ranks
from recipes_lib.core.ranks.gradient_norm import clip_gradients

LossSum = Callable[[Any, Batch], torch.Tensor]

# --- rows and tokens ------------------------------------------------------------------------------


def rank_rows(batch_size: int, *, mesh: DeviceMesh | None = None) -> slice:
    """Which rows of a batch of all ranks are this rank's: `batch["input_ids"][rank_rows(8)]`.

    Args:
        batch_size: rows of all ranks together.
        mesh: the ranks that share the rows, if they are not all ranks. Ranks of tensor, context or
            pipeline parallelism work on the same rows, so their axis is not in it.

    Raises ValueError if the rows do not divide.
    """
    place = rank()
    parts = world_size()
    if mesh is not None:
        place = 0
        parts = mesh.size()
        for axis, coordinate in enumerate(mesh.get_coordinate()):  # the mesh row by row
            place = place * mesh.size(axis) + coordinate
    if batch_size % parts:
        raise ValueError(f"batch_size={batch_size}: give a multiple of the {parts} ranks")
    rows = batch_size // parts
    return slice(place * rows, (place + 1) * rows)


def counted_tokens(labels: torch.Tensor, *, mesh: DeviceMesh | None = None) -> int:
    """How many tokens count in the loss, over all ranks.

    Args:
        labels: this rank's [rows, tokens], unshifted: nothing predicts the first of a row.
        mesh: the ranks that have different tokens, if they are not all ranks.
    """
    (count,) = sums_over_ranks(int(count_targets(labels)), mesh=mesh)
    return int(count)


def tokens_of_all_ranks(batches: Sequence[Batch]) -> int:
    """How many tokens of the micro-batches of all ranks count in the loss.

    Raises ValueError on every rank if no token has a label, and if the ranks have different numbers
    of micro-batches: one that has more would wait for the others for ever.
    """
    count = sum(int(count_targets(batch["labels"])) for batch in batches)
    own = torch.tensor([count, len(batches)], device=group_device())
    of_all = [torch.empty_like(own) for _ in range(world_size())]
    distributed.all_gather(of_all, own)
    counts, numbers = torch.stack(of_all).T.tolist()
    if min(numbers) != max(numbers) or numbers[0] == 0:
        raise ValueError(
            f"the ranks have {numbers} micro-batches: give every rank the same number, 1 or more"
        )
    if sum(counts) == 0:
        raise ValueError(f"every label of every rank is {IGNORED}: no token is left to train on")
    return sum(counts)


# --- a step ---------------------------------------------------------------------------------------


def rank_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    *,
    max_norm: float | None = None,
    reduce_each: bool = False,
    loss_sum: LossSum = sum_of_losses,
) -> float:
    """One weighted step on the micro-batches `batches` of this rank; every rank calls it.

    `model` is wrapped by DistributedDataParallel, sharded, or cut by tensor parallelism.

    Args:
        batches: micro-batches with `input_ids` and `labels` [B, S]; their sizes may differ.
        max_norm: clip the gradients of the whole batch to this norm.
        reduce_each: average the gradients in each micro-batch, and not in the last one only.
        loss_sum: the sum of the losses of a micro-batch.
    Returns the loss of the whole batch, a mean over all its tokens, the same on every rank.
    Raises ValueError on every rank as `tokens_of_all_ranks`.
    """
    divided = hasattr(model, "no_sync") or any(isinstance(p, DTensor) for p in model.parameters())
    if world_size() > 1 and not divided:
        raise ValueError(
            f"{type(model).__name__} averages no gradients, and every rank would train a model of "
            f"its own: give what apply_data_parallel, apply_zero or apply_fully_sharded returned"
        )
    tokens = tokens_of_all_ranks(batches)
    weight = world_size() / tokens
    last = len(batches) - 1
    own_sum = 0.0
    for number, batch in enumerate(batches):
        with averaging(model, now=reduce_each or number == last):
            loss = loss_sum(model, batch)
            (loss * weight).backward()
        own_sum += loss.detach()
    if max_norm is not None:
        clip_gradients(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    (loss_of_all,) = sums_over_ranks(float(own_sum))
    return loss_of_all / tokens


def averaging(model: Any, *, now: bool) -> contextlib.AbstractContextManager[None]:
    """Around a micro-batch of a step: gradients are averaged over ranks after it, or not yet."""
    if hasattr(model, "set_requires_gradient_sync"):  # fully_shard
        model.set_requires_gradient_sync(now)
    elif not now:
        return model.no_sync()  # DistributedDataParallel
    return contextlib.nullcontext()
