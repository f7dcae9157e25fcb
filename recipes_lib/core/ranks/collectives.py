"""Collectives under the names of this PyTorch, and sums of a few numbers over ranks."""

from __future__ import annotations

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from recipes_lib.core.ranks import group_device

# --- collectives whose names have changed ---------------------------------------------------------


def all_gather(
    whole: torch.Tensor, part: torch.Tensor, *, group: distributed.ProcessGroup | None = None
) -> None:
    """Fill `whole` [N x rows, ...] with the `part` [rows, ...] of every rank, in their order."""
    # PyTorch 2.13 has new names for the collectives on one tensor, and warns of the old ones.
    if hasattr(distributed, "all_gather_single"):
        distributed.all_gather_single(whole, part, group=group)
    else:
        distributed.all_gather_into_tensor(whole, part, group=group)


def reduce_scatter(
    part: torch.Tensor, whole: torch.Tensor, *, group: distributed.ProcessGroup | None = None
) -> None:
    """Fill `part` [rows, ...] with this rank's rows of the sum of every rank's `whole`."""
    if hasattr(distributed, "reduce_scatter_single"):
        distributed.reduce_scatter_single(part, whole, group=group)
    else:
        distributed.reduce_scatter_tensor(part, whole, group=group)


# --- sums -----------------------------------------------------------------------------------------


def sums_over_ranks(*numbers: float, mesh: DeviceMesh | None = None) -> list[float]:
    """The sum of each number over the ranks, in one collective for all numbers.

    A process that is alone gets its own numbers. `mesh` names the ranks, if they are not all ranks.
    """
    if not distributed.is_initialized():
        return list(numbers)
    sums = torch.tensor(numbers, dtype=torch.float64, device=group_device())
    for group in _groups(mesh):
        distributed.all_reduce(sums, group=group)
    return sums.tolist()


def _groups(mesh: DeviceMesh | None) -> list[distributed.ProcessGroup | None]:
    """Groups over which to reduce, one after the other, to reach all ranks of a mesh."""
    if mesh is None:
        return [None]  # the default group
    return [mesh.get_group(axis) for axis in range(mesh.ndim)]
