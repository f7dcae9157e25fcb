"""How many bytes per second this device reads from memory: the limit of decoding.

    bandwidth = measure_read_bandwidth()
    weight_bytes / bandwidth                    the least seconds per token, at one token per call
    weight_bytes / seconds / bandwidth          the share of the limit that a decoder reaches

A step of one token reads every weight once and uses it for one multiplication, so arithmetic is no
limit. What counts is what reading a large tensor does reach here, with the threads that torch has.
Two operators read each element once and keep nothing: the sum and the largest number. Which of them
is faster depends on the processor. The tensor is larger than all caches. The best of several tries
counts: whatever else runs can only slow it.
"""

from __future__ import annotations

import time

import torch

from recipes_lib.core.measure import timed
from recipes_lib.core.measure.machine import machine

SECONDS = 0.5
LEAST_TRIES = 5

BYTES_ON_CPU = 256 * 2**20
BYTES_ON_GPU = 2 * 2**30


def measure_read_bandwidth() -> float:
    """Bytes per second of the fastest of several readings of one large fp32 tensor."""
    device = machine().device
    size = BYTES_ON_GPU if device == "cuda" else BYTES_ON_CPU
    # Written once: pages that nobody has written share one page of zeros, which stays in the cache.
    numbers = torch.ones(size // 4, device=device)
    tries = []
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(tries) < LEAST_TRIES:
        for read in (numbers.sum, numbers.amax):
            seconds, _ = timed(read)
            tries.append(seconds)
    return numbers.nbytes / min(tries)
