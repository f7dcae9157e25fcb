"""What one rank holds between two steps: bytes of parameters, gradients and optimizer states.

    held = rank_bytes(model, optimizer)
    held.parameters, held.gradients, held.states        each in bytes, on this rank alone

Of a DTensor this rank's part counts, and memory that two tensors share counts once. What easily
escapes a count is here, too:

    buckets             DistributedDataParallel copies all gradients into buckets, which stay. With
                        `gradient_as_bucket_view=True` the gradients are views of them.
    gathered            `fully_shard` keeps whole parameters from forward to backward if it does not
                        reshard, and whole gradients while `set_requires_gradient_sync(False)`.
    scales              Those of a bitsandbytes weight lie beside it, whole on every rank.

The peak of a step is another number: `core.measure.PeakMemory` counts the activations as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from recipes_lib.core.model.bytes_of_tensors import (
    plain_tensors,
    quantization_tensors,
    state_tensors,
    tensor_bytes,
)

Seen = set[tuple[int, int]]  # places in memory that have been counted


@dataclass(frozen=True)
class RankBytes:
    """What one rank holds, in bytes."""

    parameters: int  # with the scales of quantized ones
    gradients: int  # with DDP's buckets
    states: int
    gathered: int = 0  # what `fully_shard` keeps whole just now


def rank_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> RankBytes:
    """The bytes that this rank holds now, measured. No collective: each rank may call it alone.

    Args:
        model: plain, or wrapped by DistributedDataParallel, or sharded.
        optimizer: with its states, which exist after the first step; without it they count 0.
    """
    seen: Seen = set()
    split = _split_parameters(model)
    parameters = _at_rest(model, split)
    gradients = [parameter.grad for parameter in parameters]
    scales = []
    for owner in (*parameters, *model.modules()):  # once it is sharded, the layer has them
        scales += quantization_tensors(owner)
    states = [] if optimizer is None else state_tensors(optimizer)
    return RankBytes(
        parameters=_new_bytes([*parameters, *scales], seen),
        gradients=_new_bytes(gradients, seen) + _bucket_bytes(model),
        states=_new_bytes(states, seen),
        gathered=_new_bytes(_gathered(split), seen),
    )


def _new_bytes(values: Iterable[Any], seen: Seen) -> int:
    """Measured bytes of tensors that were not seen before; of a DTensor, of this rank's part."""
    total = 0
    for value in values:
        for tensor in plain_tensors(value):
            storage = tensor.untyped_storage()
            place = (storage._cdata, tensor.storage_offset())
            if place not in seen:
                seen.add(place)
                # A storage may have been freed under a tensor that still has its shape.
                total += min(tensor_bytes(tensor), storage.nbytes())
    return total


def _bucket_bytes(model: nn.Module) -> int:
    """Measured bytes of DistributedDataParallel's buckets that are no `.grad`."""
    if not isinstance(model, DistributedDataParallel):
        return 0
    total = 0
    for name, parameter in model.module.named_parameters():
        averaged = parameter.requires_grad and name not in model.parameters_to_ignore
        # As a view of its bucket, a gradient that exists has been counted already.
        if averaged and (parameter.grad is None or not model.gradient_as_bucket_view):
            total += tensor_bytes(parameter)
    return total


# --- fully_shard ----------------------------------------------------------------------------------


def is_sharded(model: nn.Module) -> bool:
    """Whether a part of `model` is sharded by `fully_shard`."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def _split_parameters(model: nn.Module) -> list[Any]:
    """To measure: PyTorch's records of the parameters that `fully_shard` has split."""
    found = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            for group in getattr(state, "_fsdp_param_groups", [state._fsdp_param_group]):
                if group is not None:
                    found += group.fsdp_params
    return found


def _at_rest(model: nn.Module, split: list[Any]) -> list[nn.Parameter]:
    """To measure: parameters, of split ones this rank's part, whether or not gathered now."""
    whole = {id(_gathered_parameter(each)) for each in split}
    others = [parameter for parameter in model.parameters() if id(parameter) not in whole]
    return [*(each.sharded_param for each in split), *others]


def _gathered(split: list[Any]) -> list[torch.Tensor | None]:
    """To measure: whole parameters, and whole gradients that wait for the last micro-batch."""
    found = []
    for each in split:
        found += [*each.all_gather_outputs, each.unsharded_accumulated_grad]
        found.append(getattr(_gathered_parameter(each), "grad", None))
    return found


def _gathered_parameter(split_parameter: Any) -> nn.Parameter | None:
    """To measure: the gathered parameter; None before the first forward."""
    return getattr(split_parameter, "_unsharded_param", None)
