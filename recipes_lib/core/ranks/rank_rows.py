"""Which rows of a batch are this rank's, and what loss they have together.

A mean over the ranks' means is not the mean: ranks count unequal numbers of tokens.
`counted_tokens` and `global_mean_loss` count over all ranks.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from recipes_lib.core.checks import check_flag, check_whole
from recipes_lib.core.ranks import rank, world_size
from recipes_lib.core.ranks.collectives import sums_over_ranks

NO_LABEL = -100  # what a label has where nothing is to be predicted


def rank_rows(batch_size: int, *, mesh: DeviceMesh | None = None) -> slice:
    """Which rows of a batch of all ranks are this rank's: `batch["input_ids"][rank_rows(8)]`.

    Args:
        batch_size: rows of all ranks together.
        mesh: the ranks that share the rows, if they are not all ranks. Ranks of tensor, context or
            pipeline parallelism work on the same rows, so their axis is not in it.

    Raises ValueError if the rows do not divide, and if this rank is not in the mesh.
    """
    check_whole(batch_size=batch_size)
    place, parts = _place(mesh)
    if batch_size % parts:
        raise ValueError(f"batch_size={batch_size}: give a multiple of the {parts} ranks")
    rows = batch_size // parts
    return slice(place * rows, (place + 1) * rows)


def counted_tokens(
    labels: torch.Tensor, *, mesh: DeviceMesh | None = None, shifted: bool = False
) -> int:
    """How many tokens count in the loss, over all ranks.

    Args:
        labels: this rank's [rows, tokens]; -100 does not count.
        mesh: the ranks that have different tokens, if they are not all ranks.
        shifted: whether labels[:, i] belongs to token i + 1 already. Hugging Face's do not, and the
            first one of each row is never predicted.
    """
    check_flag(shifted=shifted)
    if not shifted:
        labels = labels[:, 1:]
    mine = int((labels != NO_LABEL).sum())
    (count,) = sums_over_ranks(mine, mesh=mesh)
    return int(count)


def global_mean_loss(
    loss_sum: float | torch.Tensor, count: float, *, mesh: DeviceMesh | None = None
) -> float:
    """The mean loss over the tokens of all ranks, for the log.

    Args:
        loss_sum: the sum of the losses of this rank's tokens.
        count: how many tokens of this rank count. It may be 0, but not on all ranks.
        mesh: the ranks that have different tokens, if they are not all ranks.

    Raises ValueError on every rank if no token counts at all.
    """
    if isinstance(loss_sum, torch.Tensor):
        loss_sum = loss_sum.detach()
    total, tokens = sums_over_ranks(float(loss_sum), float(count), mesh=mesh)
    if tokens == 0:
        raise ValueError("no token of any rank counts: give labels that are not all -100")
    return total / tokens


def _place(mesh: DeviceMesh | None) -> tuple[int, int]:
    """The number of this rank within a mesh, row by row, and how many ranks the mesh has."""
    if mesh is None:
        return rank(), world_size()
    coordinates = mesh.get_coordinate()
    if coordinates is None:
        raise ValueError(f"rank {rank()} is not in {mesh}: give a mesh that all callers are in")
    place = 0
    for axis, coordinate in enumerate(coordinates):
        place = place * mesh.size(axis) + coordinate
    return place, mesh.size()
