"""Bytes of tensors, parameters and optimizer states, as they are stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch


def parts_needed(count: int, size: int) -> int:
    """How many parts of `size` elements or bytes hold `count`: the quotient, rounded up."""
    return (count + size - 1) // size


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements, whatever else shares the storage."""
    return tensor.numel() * tensor.element_size()


def weight_bytes(model: Any) -> int:
    """Bytes of all parameters and buffers as stored, each storage once (tied weights are one)."""
    tensors = [*model.parameters(), *model.buffers()]
    for parameter in model.parameters():
        tensors += quantization_tensors(parameter)
    return storage_bytes(tensors)


def trainable_bytes(model: Any) -> int:
    """Bytes of the parameters that train, and so of their gradients."""
    return sum(tensor_bytes(p) for p in model.parameters() if p.requires_grad)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each once."""
    sizes = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The tensors among the optimizer's states; torchao's states are tensors made of tensors."""
    for state in optimizer.state.values():
        for value in state.values():
            yield from plain_tensors(value)
    inner = getattr(optimizer, "optim", None)  # ZeroRedundancyOptimizer keeps them in another one
    if inner is not None:
        yield from state_tensors(inner)


def plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    """The plain tensors of which `value` is made, if it is a tensor; otherwise none."""
    if hasattr(value, "__tensor_flatten__"):
        names, _ = value.__tensor_flatten__()
        for name in names:
            yield from plain_tensors(getattr(value, name))
    elif isinstance(value, torch.Tensor):
        yield value


def quantization_tensors(parameter: torch.Tensor) -> list[torch.Tensor]:
    """Tensors to count beside a 4-bit weight of bitsandbytes: scales and code tables; else none."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return []
    tensors = [state.absmax, state.code, getattr(state, "offset", None)]
    nested = getattr(state, "state2", None)  # of double quantization: the scales are quantized, too
    if nested is not None:
        tensors += [nested.absmax, nested.code]
    return [tensor for tensor in tensors if tensor is not None]
