"""Which kernels of attention take fewer heads of keys and values than of queries."""

from __future__ import annotations

import torch

from recipes_lib.core.measure.machine import machine


def without_grouped_heads(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether, on this CUDA device, SDPA's fast kernels want as many heads of K and V as of Q.

    Only the flash kernel takes fewer: it needs 16 bits and Ampere or newer. A model without weights
    stands for one on this machine.
    """
    if device.type == "meta":
        device = torch.device(machine().device)
    if device.type != "cuda":
        return False
    return dtype.itemsize == 4 or torch.cuda.get_device_capability(device) < (8, 0)
