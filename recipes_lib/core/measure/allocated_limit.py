"""Out of memory on a GPU at so many bytes of tensors: how a large card stands in for a smaller one.

PyTorch can cap its own allocator (`torch.cuda.set_per_process_memory_fraction`), and that is
another limit: it counts what the allocator has *reserved*. A model that was built in fp32 and then
quantized lies in pieces in the memory of its fp32 weights:

    reserved     [ fp32 weights, freed . . . . . . . . . . ]  [ the next ones, freed . . . . . . ]
    allocated      [4 bits]                                     [4 bits]

Whole segments stay reserved for a few small tensors in each. Under such a cap a step runs out of
memory that a card of this size, on which the model was loaded in four bits, would take with ease.

So this limit asks the allocator after every operator what was *allocated* at most, scratch memory
of the operator included. It is a dispatch mode, as the account of `live_bytes.py` is: PyTorch hands
it every operator, those of backward included. Compiled code runs as it is and counts as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class AllocatedLimit(TorchDispatchMode):
    """The operator that takes the GPU's tensors over `limit_bytes` raises torch.OutOfMemoryError.

    Args:
        restart_peak: restarts the allocator's counter of its peak. It is called where an operator
            before went over the limit, whose error was caught and whose tensors are gone.
    """

    def __init__(self, limit_bytes: int, *, restart_peak: Callable[[], Any]) -> None:
        super().__init__()
        self._limit = limit_bytes
        self._restart_peak = restart_peak

    def ignore_compile_internals(self) -> bool:
        """Asked by torch.compile, which otherwise compiles nothing inside of a dispatch mode."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if peak_of_allocator() > self._limit:
            self._restart_peak()
        out = func(*args, **(kwargs or {}))
        peak = peak_of_allocator()
        if peak > self._limit:
            raise torch.OutOfMemoryError(
                f"emulated out of memory: {peak:,} bytes of tensors were alive, "
                f"the limit is {self._limit:,}"
            )
        return out


def peak_of_allocator() -> int:
    """The most bytes of tensors on the GPU since the counter began.

    `torch.cuda.max_memory_allocated` says the same, and sorts all other statistics first.
    """
    statistics = torch.cuda.memory_stats_as_nested_dict()
    return statistics["allocated_bytes"]["all"]["peak"]
