"""Clipping by the norm of all gradients, of which each rank holds what it holds.

`torch.nn.utils.clip_grad_norm_` refuses parameters of several meshes, and DTensors beside plain
ones. Here the parts are added up by what each rank holds:

    plain tensor           whole on every rank: it counts once
    DTensor, Replicate     the same
    DTensor, Shard         the squares are summed over the ranks of the mesh's axis
    DTensor, Partial       the ranks' tensors are summed first
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from recipes_lib.core.checks import check_number
from recipes_lib.core.ranks.collectives import sums_over_ranks

# Where the parts of a tensor are: over which axes of which mesh it is split, if over any.
Place = tuple[DeviceMesh | None, tuple[int, ...]]


def clip_gradients(
    parameters: Iterable[nn.Parameter], max_norm: float, *, stages: DeviceMesh | None = None
) -> float:
    """Scale all gradients so that their norm over all ranks is `max_norm` at most.

    Args:
        parameters: this rank's, with their gradients. All ranks give the same ones in one order.
        max_norm: of all gradients together. `math.inf` only measures.
        stages: ranks that hold other parameters altogether, as pipeline stages do.

    Returns the norm before clipping. Raises ValueError for a `max_norm` that is not above 0.
    """
    if max_norm != math.inf:
        check_number(above=0, max_norm=max_norm)
    held = [parameter for parameter in parameters if parameter.requires_grad]
    squares = 0.0
    for place, gradients in _by_place(held).items():
        squares += _sum_of_squares(gradients, place)
    if stages is not None:
        (squares,) = sums_over_ranks(squares, mesh=stages)
    norm = math.nan if math.isnan(squares) else math.sqrt(squares)
    if max_norm == math.inf:
        return norm
    factor = max_norm / (norm + 1e-6)
    # A factor that is not a number goes into every gradient, on every rank: the run shows it.
    if factor < 1 or math.isnan(factor):
        own = [_own_part(parameter.grad) for parameter in held if parameter.grad is not None]
        torch._foreach_mul_(own, factor)
    return norm


def _by_place(parameters: list[nn.Parameter]) -> dict[Place, list[torch.Tensor]]:
    """This rank's parts of the gradients, for the norm.

    The place of a parameter that has no gradient is there as well: all ranks have to reduce over
    the same places in the same order.
    """
    found: dict[Place, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            found.setdefault(_mesh_of_gradient(parameter), [])
            continue
        gradient = _summed(parameter.grad)
        found.setdefault(_mesh_of_gradient(gradient), []).append(_own_part(gradient))
    return found


def _mesh_of_gradient(tensor: torch.Tensor) -> Place:
    if not isinstance(tensor, DTensor):
        return None, ()
    whole = [place.is_replicate() or place.is_partial() for place in tensor.placements]
    axes = [axis for axis, is_whole in enumerate(whole) if not is_whole]
    return tensor.device_mesh, tuple(axes)


def _summed(tensor: torch.Tensor) -> torch.Tensor:
    """A gradient with the sum on every rank, where each rank has only a summand."""
    if not isinstance(tensor, DTensor):
        return tensor
    if not any(place.is_partial() for place in tensor.placements):
        return tensor
    placements = [Replicate() if place.is_partial() else place for place in tensor.placements]
    return tensor.redistribute(placements=placements)


def _own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a gradient."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def _sum_of_squares(tensors: list[torch.Tensor], place: Place) -> float:
    """Of all gradients over all ranks, in fp64: their order changes no digit that counts."""
    total = 0.0
    if tensors:
        # The norm of a 16-bit tensor would have 16 bits as well.
        exact = any(tensor.dtype == torch.float64 for tensor in tensors)
        dtype = torch.float64 if exact else torch.float32
        norms = torch._foreach_norm(tensors, 2, dtype=dtype)
        # Offloaded gradients are elsewhere. One wait for the device serves all norms.
        together = torch.stack([norm.to(norms[0].device) for norm in norms])
        total = together.double().square().sum().item()
    mesh, axes = place
    if not axes:
        return total
    over_ranks = torch.tensor(total, dtype=torch.float64, device=mesh.device_type)
    for axis in axes:
        distributed.all_reduce(over_ranks, group=mesh.get_group(axis))
    return over_ranks.item()
