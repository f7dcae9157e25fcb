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

from recipes_lib.parallel.checkpoint_state import OPTIONS

Values = dict[str, list[float | None]]


def frozen_values(model: torch.nn.Module) -> Values:
    """16 values of each frozen weight by name, spread over the whole weight. All ranks call it.

    Weights in whole numbers are left out: two devices may round the same base differently. So are
    those of which ranks hold other values without saying so, as `quantized_shards` does: other
    ranks would have other ones.
    """
    trained = get_model_state_dict(model, options=OPTIONS).keys()
    own = {}
    for name, tensor in get_model_state_dict(model).items():
        if name not in trained and tensor.is_floating_point() and tensor.numel() > 0:
            own[name] = _values_here(tensor.detach())
    if not distributed.is_initialized():
        return own
    of_ranks: list[Values] = [{} for _ in range(distributed.get_world_size())]
    distributed.all_gather_object(of_ranks, own)
    return _joined(of_ranks)


def check_base(place: Path, saved: Mapping[str, list[float | None]], given: Values) -> None:
    """Raise ValueError if a frozen weight that both know has other values."""
    odd = sorted(name for name in given if saved.get(name, given[name]) != given[name])
    if odd:
        raise ValueError(
            f"{place} was trained on another base: {len(odd)} frozen weights have other values, "
            f"the first is {odd[0]}; load the base of that run"
        )


def _values_here(tensor: Tensor) -> list[float | None]:
    """The values at 16 places of the whole tensor, None where another rank has them."""
    places = torch.linspace(0, tensor.numel() - 1, 16, dtype=torch.float64).long()
    if not isinstance(tensor, DTensor):
        return tensor.reshape(-1)[places.to(tensor.device)].float().tolist()
    part = tensor.to_local()
    _, first = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    values = []
    for index in zip(*torch.unravel_index(places, tensor.shape), strict=True):
        here = [int(i) - start for i, start in zip(index, first, strict=True)]
        inside = all(0 <= i < size for i, size in zip(here, part.shape, strict=True))
        values.append(part[tuple(here)].float().item() if inside else None)
    return values


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
    found = set(column) - {None}
    if len(found) != 1:
        return None
    return found.pop()
