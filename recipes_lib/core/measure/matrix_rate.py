"""How fast this device multiplies matrices: the limit that a training step can come near.

    rates = measure_matrix_rates()         {torch.float32: 1.1e11, torch.bfloat16: 4.0e11}
    operations / rates[dtype] / seconds    the share of the limit that a step reaches

A data sheet says what a chip could do at its highest clock. What counts here is what one large
product does reach on this machine, with its cores, its libraries and its cooling. A product of
large squares reads each element from memory once and uses it in thousands of operations, so memory
is no limit for it. The best of several tries counts: whatever else runs can only slow a product.
"""

from __future__ import annotations

import time

import torch

from recipes_lib.core.measure import timed
from recipes_lib.core.measure.machine import machine

SECONDS = 0.5  # for each dtype
LEAST_TRIES = 3

# Rows of the squares. They are many enough for the full rate, and few enough for several tries.
SQUARE_ON_CPU = 1536
SQUARE_ON_GPU = 8192


def measure_matrix_rates() -> dict[torch.dtype, float]:
    """Operations per second of products in fp32, and in the 16 bits that this device computes in.

    A multiplication and an addition are two operations. On a CPU without native bf16 there is
    fp32 only: its 16-bit products are emulated.
    """
    dtypes = [torch.float32]
    if machine().compute_dtype != torch.float32:
        dtypes.append(machine().compute_dtype)
    return {dtype: _rate(dtype) for dtype in dtypes}


def _rate(dtype: torch.dtype) -> float:
    device = machine().device
    size = SQUARE_ON_GPU if device == "cuda" else SQUARE_ON_CPU
    left = torch.randn(size, size, device=device).to(dtype)  # [size, size]
    right = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty_like(left)

    def product() -> None:
        torch.matmul(left, right, out=out)

    product()  # the first one sets up the library
    tries = []
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(tries) < LEAST_TRIES:
        seconds, _ = timed(product)
        tries.append(seconds)
    return 2 * size**3 / min(tries)
