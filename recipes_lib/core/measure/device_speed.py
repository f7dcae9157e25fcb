"""How fast this device multiplies matrices, and how fast it reads memory: the limits of a step.

    rates = measure_matrix_rates()         {torch.float32: 1.1e11, torch.bfloat16: 4.0e11}
    operations / rates[dtype]              the least seconds of a training step
    bandwidth = measure_read_bandwidth()
    weight_bytes / bandwidth               the least seconds per token, at one token per call

A data sheet says what a chip could do at its highest clock. What counts here is what it does reach
on this machine, with its cores, its libraries and its cooling. A product of large squares uses each
element that it reads in thousands of operations, so memory is no limit for it. A step of one token
reads every weight for one multiplication, so arithmetic is none. The best of several tries counts:
whatever else runs can only slow one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from recipes_lib.core.measure import timed
from recipes_lib.core.measure.machine import machine

SECONDS = 0.5  # for each limit
LEAST_TRIES = 5

# Rows of the squares. They are many enough for the full rate, and few enough for several tries.
SQUARE_ON_CPU = 1536
SQUARE_ON_GPU = 8192

BYTES_ON_CPU = 256 * 2**20  # more than all caches
BYTES_ON_GPU = 2 * 2**30
VECTOR = 8192  # numbers in a row of the matrix


def measure_matrix_rates() -> dict[torch.dtype, float]:
    """Operations per second of products in fp32, and in the 16 bits that this device computes in.

    A multiplication and an addition are two operations. On a CPU without native bf16 there is
    fp32 only: its 16-bit products are emulated.
    """
    dtypes = dict.fromkeys([torch.float32, machine().compute_dtype])
    return {dtype: _rate_of_products(dtype) for dtype in dtypes}


def _rate_of_products(dtype: torch.dtype) -> float:
    """Operations per second of a product of two square matrices in this dtype."""
    device = machine().device
    size = SQUARE_ON_GPU if device == "cuda" else SQUARE_ON_CPU
    left = torch.randn(size, size, device=device).to(dtype)  # [size, size]
    right = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty_like(left)

    def product() -> None:
        torch.matmul(left, right, out=out)

    product()  # the first one sets up the library
    return 2 * size**3 / _fastest_of_calls(product)


def measure_read_bandwidth() -> float:
    """Bytes per second of the fastest of several readings of one large fp32 tensor.

    Three operators read each element once and keep next to nothing: the sum, the largest number and
    a product with a vector. Which of them is the fastest depends on the processor.
    """
    device = machine().device
    size = BYTES_ON_GPU if device == "cuda" else BYTES_ON_CPU
    # Written once: pages that nobody has written share one page of zeros, which stays in the cache.
    numbers = torch.ones(size // 4, device=device)
    matrix = numbers.view(-1, VECTOR)
    vector = torch.ones(VECTOR, device=device)
    readings = (numbers.sum, numbers.amax, partial(torch.mv, matrix, vector))
    return numbers.nbytes / min(_fastest_of_calls(reading) for reading in readings)


def _fastest_of_calls(call: Callable[[], Any]) -> float:
    """On this device: seconds of the fastest of several calls."""
    tries = []
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(tries) < LEAST_TRIES:
        seconds, _ = timed(call)
        tries.append(seconds)
    return min(tries)
