"""Collectives under the names of this PyTorch, an exchange, and sums of a few numbers."""

from __future__ import annotations

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from recipes_lib.core.ranks import group_device

Group = distributed.ProcessGroup | None

# PyTorch 2.13 has new names for the collectives on one tensor, and warns of the old ones.
_NEW_NAMES = hasattr(distributed, "all_gather_single")


def all_gather(whole: torch.Tensor, part: torch.Tensor, *, group: Group = None) -> None:
    """Fill `whole` [N x rows, ...] with the `part` [rows, ...] of every rank, in their order."""
    call = distributed.all_gather_single if _NEW_NAMES else distributed.all_gather_into_tensor
    call(whole, part, group=group)


def reduce_scatter(part: torch.Tensor, whole: torch.Tensor) -> None:
    """Fill `part` [rows, ...] with this rank's rows of the sum of every rank's `whole`."""
    call = distributed.reduce_scatter_single if _NEW_NAMES else distributed.reduce_scatter_tensor
    call(part, whole)


def exchange(
    given: torch.Tensor, arrived: torch.Tensor, *, target: int, source: int, group: Group = None
) -> list[distributed.Work]:
    """Send and receive at the same time. One after the other, all would wait for each other.

    `target` and `source` count inside of the group. `arrived` is there, and `given` may change,
    when all works that this returns have been waited for.
    """
    both = [
        distributed.P2POp(distributed.isend, given, group=group, group_peer=target),
        distributed.P2POp(distributed.irecv, arrived, group=group, group_peer=source),
    ]
    return distributed.batch_isend_irecv(both)


def sums_over_ranks(*numbers: float, mesh: DeviceMesh | None = None) -> list[float]:
    """The sum of each number over the ranks, in one collective for all numbers.

    A process that is alone gets its own numbers. `mesh` names the ranks, if they are not all ranks.
    """
    if not distributed.is_initialized():
        return list(numbers)
    sums = torch.tensor(numbers, dtype=torch.float64, device=group_device())
    groups: list[Group] = [None]  # all ranks
    if mesh is not None:  # one axis after the other reaches all ranks of a mesh
        groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    for group in groups:
        distributed.all_reduce(sums, group=group)
    return sums.tolist()
