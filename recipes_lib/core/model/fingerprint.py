"""A short name for the values of many tensors: are these the weights of that other run?

    fingerprint(model.named_parameters())                        the same weights, in the same dtype
    fingerprint(model.named_parameters(), rounded_to=torch.bfloat16)    in fp32 and in bf16 alike

Names and shapes count, and of each tensor some values, spread from its first to its last. So it
costs milliseconds, and tells models apart of which one was trained, even for a step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

VALUES = 64  # of each tensor


def fingerprint(
    tensors: Iterable[tuple[str, Tensor]], *, rounded_to: torch.dtype | None = None
) -> str:
    """A hash of named tensors, as 16 letters and digits.

    Of a tensor in whole numbers, as weights in 4 bits, only name and shape count: two devices may
    round differently. Of a tensor in parts over ranks, every rank of its mesh must ask.

    Args:
        rounded_to: compare the values in this dtype; by default the tensors' own counts as well.
    """
    digest = hashlib.sha256()
    values = []
    for name, tensor in tensors:
        dtype = rounded_to or tensor.dtype
        digest.update(f"{name} {list(tensor.shape)} {dtype};".encode())
        if tensor.is_floating_point() and tensor.numel() > 0:
            values.append(_spread_values(tensor).to(dtype).double())
    if values:
        # One copy for all of them: each copy from a GPU waits for it.
        device = values[0].device
        together = torch.cat([of_tensor.to(device) for of_tensor in values])
        digest.update(together.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _spread_values(tensor: Tensor) -> Tensor:
    """For the fingerprint: VALUES numbers of a tensor, from the first to the last."""
    places = torch.linspace(0, tensor.numel() - 1, VALUES, dtype=torch.float64).long()
    places = places.to(tensor.device)
    if isinstance(tensor, DTensor):
        return _values_of_parts(tensor, places)
    return tensor.detach().reshape(-1)[places]


def _values_of_parts(tensor: DTensor, places: Tensor) -> Tensor:
    """For the fingerprint of parts: each rank has its values, and zeros; the sum is the whole."""
    part = tensor.detach().to_local()
    _, first = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    index = torch.stack(torch.unravel_index(places, tensor.shape))  # [dimensions, VALUES]
    index -= torch.tensor(first, device=index.device)[:, None]
    size = torch.tensor(part.shape, device=index.device)[:, None]
    inside = ((index >= 0) & (index < size)).all(0)
    values = part.new_zeros(VALUES)
    values[inside] = part[tuple(index[:, inside])]
    summed = [place if place.is_replicate() else Partial() for place in tensor.placements]
    return DTensor.from_local(values, tensor.device_mesh, summed).full_tensor()
