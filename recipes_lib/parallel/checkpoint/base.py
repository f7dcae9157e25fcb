"""Which base is trained: 16 values of each frozen weight, the same on any number of ranks.

A sharded checkpoint holds what trains. Adapters of another base load without an error, because
their shapes agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, distributed
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from recipes_lib.parallel.checkpoint.state import OPTIONS

PLACES = 16
Values = dict[str, list[float | None]]


def frozen_values(model: torch.nn.Module) -> Values:
    """16 values of each frozen weight by name, spread over the whole weight. All ranks call it.

    Weights in whole numbers are left out: two devices may round the same base differently. So are
    those of which ranks hold other values without saying so, as `quantized_shards` does: other
    ranks would have other ones.
    """
    trained = get_model_state_dict(model, options=OPTIONS).keys()
    inside = {}
    values = []
    for name, tensor in get_model_state_dict(model).items():
        if name not in trained and tensor.is_floating_point() and tensor.numel() > 0:
            inside[name], values_here = _values_here(tensor.detach())
            values.append(values_here)
    own = _by_name(inside, values)
    if not distributed.is_initialized():
        return own
    of_ranks: list[Values] = [{} for _ in range(distributed.get_world_size())]
    distributed.all_gather_object(of_ranks, own)
    return _joined(of_ranks)


def check_base(place: Path, saved: Mapping[str, list[float | None]], given: Values) -> None:
    """Raise ValueError if a frozen weight that both know has other values."""
    # As text: NaN is not equal to itself, and a base that has it is still the same base.
    odd = sorted(name for name in given if str(saved.get(name, given[name])) != str(given[name]))
    if odd:
        raise ValueError(
            f"{place} was trained on another base: {len(odd)} frozen weights have other values, "
            f"the first is {odd[0]}; load the base of that run"
        )


def _values_here(tensor: Tensor) -> tuple[list[bool], Tensor]:
    """Which of 16 places of the whole tensor this rank has, and the values there."""
    places = torch.linspace(0, tensor.numel() - 1, PLACES, dtype=torch.float64).long()
    inside = torch.ones(PLACES, dtype=torch.bool)
    if not isinstance(tensor, DTensor) or tensor.dim() == 0:
        part = _local(tensor).reshape(-1)
        index = [places]
    else:
        part = _local(tensor)
        _, first = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        index = []
        whole_index = torch.unravel_index(places, tensor.shape)
        for of_dimension, start, size in zip(whole_index, first, part.shape, strict=True):
            here = of_dimension - start
            inside &= (here >= 0) & (here < size)
            index.append(here)
    # Not blocking: else the copy of these few numbers to a GPU waits for all that it has to do.
    own = [here[inside].to(part.device, non_blocking=True) for here in index]
    return inside.tolist(), part[tuple(own)].float()


def _local(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def _by_name(inside: dict[str, list[bool]], values: list[Tensor]) -> Values:
    """16 values for each name, None where another rank has them."""
    if not values:
        return {}
    # One copy for all of them: each copy from a GPU waits for it.
    device = values[0].device
    together = iter(torch.cat([of_tensor.to(device) for of_tensor in values]).tolist())
    found = {}
    for name, is_here in inside.items():
        found[name] = [next(together) if here else None for here in is_here]
    return found


def _joined(of_ranks: list[Values]) -> Values:
    """The values of all ranks, without the weights of which two ranks hold different ones."""
    every_name = dict.fromkeys(name for values in of_ranks for name in values)
    joined = {}
    for name in every_name:
        rows = [values[name] for values in of_ranks if name in values]
        values = [_only_one(column) for column in zip(*rows, strict=True)]
        if None not in values:
            joined[name] = values
    return joined


def _only_one(column: tuple[float | None, ...]) -> float | None:
    """The value that all ranks hold which hold one, None if they hold different ones."""
    # By their text: the NaN of one rank is not equal to that of another.
    found = {str(value): value for value in column if value is not None}
    if len(found) != 1:
        return None
    return next(iter(found.values()))
