"""What one rank holds between two steps: bytes of parameters, gradients and optimizer states.

    held = rank_bytes(model, optimizer)
    held.parameters, held.gradients, held.states        each in bytes, on this rank alone
    held.total / 2**20

Of a DTensor this rank's part counts, and memory that two tensors share counts once. What easily
escapes a count is here, too:

    buckets             DistributedDataParallel copies all gradients into buckets, which stay. With
                        `gradient_as_bucket_view=True` the gradients are views of them.
    gathered            `fully_shard` keeps whole parameters from forward to backward if it does not
                        reshard, and whole gradients while `set_requires_gradient_sync(False)`.
    quantization        The scales of a bitsandbytes weight lie beside it, whole on every rank.

The peak of a step is another number: `core.measure.PeakMemory` counts the activations as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from recipes_lib.core.model.sizes import (
    plain_tensors,
    quantization_tensors,
    state_tensors,
    tensor_bytes,
)


@dataclass(frozen=True)
class RankBytes:
    """What one rank holds, in bytes.

    `parameters` includes the scales of quantized ones, and `gradients` DDP's buckets. `gathered` is
    what `fully_shard` keeps whole just now. `buffers` are those of the modules, such as RoPE's.
    """

    parameters: int
    gradients: int
    states: int
    gathered: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        """All of them together."""
        return self.parameters + self.gradients + self.states + self.gathered + self.buffers


def rank_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> RankBytes:
    """The bytes that this rank holds now. No collective: each rank may call it alone.

    Args:
        model: plain, or wrapped by DistributedDataParallel, or sharded.
        optimizer: with its states, which exist after the first step; without it they count 0.
    """
    shards = list(_shards(model))
    parameters = list(_resting_parameters(model, shards))
    count = _Count()
    return RankBytes(
        parameters=count.new([*parameters, *_quantization(model, parameters)]),
        gradients=count.new(parameter.grad for parameter in parameters) + _buckets(model),
        states=count.new(() if optimizer is None else state_tensors(optimizer)),
        gathered=count.new(_gathered(shards)),
        buffers=count.new(model.buffers()),
    )


class _Count:
    """Bytes of tensors that have not been counted before, by the place of their memory."""

    def __init__(self) -> None:
        self._seen: set[tuple[int, int]] = set()

    def new(self, values: Iterable[Any]) -> int:
        total = 0
        for value in values:
            # A DTensor, or a quantized tensor, is made of plain ones: those of this rank.
            for tensor in plain_tensors(value):
                total += self._size(tensor)
        return total

    def _size(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        place = (storage._cdata, tensor.storage_offset())
        if place in self._seen:
            return 0
        self._seen.add(place)
        # A storage may have been freed under a tensor that still has its shape.
        return min(tensor_bytes(tensor), storage.nbytes())


def _quantization(model: nn.Module, parameters: list[nn.Parameter]) -> Iterator[torch.Tensor]:
    """Scales and code tables of bitsandbytes: on a weight, or on the layer once it is sharded."""
    for owner in (*parameters, *model.modules()):
        yield from quantization_tensors(owner)


# --- DistributedDataParallel ----------------------------------------------------------------------


def _buckets(model: nn.Module) -> int:
    """Bytes of the buckets that are no `.grad`."""
    total = 0
    for module in model.modules():
        if not isinstance(module, DistributedDataParallel):
            continue
        ignored = module.parameters_to_ignore
        for name, parameter in module.module.named_parameters():
            if not parameter.requires_grad or name in ignored:
                continue
            # As a view of its bucket, a gradient that exists has been counted already.
            if parameter.grad is None or not module.gradient_as_bucket_view:
                total += tensor_bytes(parameter)
    return total


# --- fully_shard ----------------------------------------------------------------------------------


def is_sharded(model: nn.Module) -> bool:
    """Whether a part of `model` is sharded by `fully_shard`."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def _shards(model: nn.Module) -> Iterator[Any]:
    """PyTorch's records of the parameters that `fully_shard` has split."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            for group in getattr(state, "_fsdp_param_groups", [state._fsdp_param_group]):
                if group is not None:
                    yield from group.fsdp_params


def _resting_parameters(model: nn.Module, shards: list[Any]) -> Iterator[nn.Parameter]:
    """The parts that this rank holds at rest, whether or not the whole is gathered just now."""
    yield from (shard.sharded_param for shard in shards)
    gathered = {id(getattr(shard, "_unsharded_param", None)) for shard in shards}
    for parameter in model.parameters():
        if id(parameter) not in gathered:
            yield parameter


def _gathered(shards: list[Any]) -> Iterator[torch.Tensor | None]:
    """Whole parameters, and whole gradients that wait for the last micro-batch."""
    for shard in shards:
        yield from shard.all_gather_outputs
        yield shard.unsharded_accumulated_grad
        whole = getattr(shard, "_unsharded_param", None)
        if whole is not None:
            yield whole.grad
