"""The peak bytes of tensors inside a block of code, the same on both devices.

    with PeakMemory() as memory:
        loss.backward()
    print(memory.peak)

On CUDA it is the allocator's own peak. On a CPU, and in a dry run, it is that of an exact account
of live storages (`live_bytes.py`).

A limit lets a large card stand in for a smaller one. PyTorch can cap its own allocator, and the cap
counts what is *reserved*. A model that was quantized from fp32 lies in pieces in the memory of its
fp32 weights: it would run out where a smaller card, on which it was loaded in four bits, does not.
So the limit here asks after every operator what was *allocated* at most.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from recipes_lib.core.checks import check_whole
from recipes_lib.core.measure.dry_run import dry
from recipes_lib.core.measure.live_bytes import LiveBytes
from recipes_lib.core.measure.machine import machine as this_machine
from recipes_lib.core.measure.timeline import Timeline, TimelineRecorder


def bytes_alive() -> int:
    """Bytes of all tensors that are alive now."""
    with PeakMemory() as memory:
        return memory.current


class PeakMemory:
    """Context manager: `peak` so far, and `current` while inside, in bytes of live tensors.

    What was alive before counts as well, as it does on a GPU. Contexts nest, and an error inside
    the block leaves no hook behind.

    Args:
        limit_bytes: run the block as on a smaller device: the operator that goes over it raises
            `torch.OutOfMemoryError`. Bytes of tensors count, on a GPU too: what its allocator has
            reserved beyond them depends on what ran before.
        model, optimizer: name them, and `timeline` holds the bytes by kind and phase afterwards.
    """

    # Shared on purpose: a CUDA device has one counter of its peak, and the open contexts take turns
    # with it.
    _open: list[PeakMemory] = []  # noqa: RUF012

    def __init__(
        self,
        *,
        limit_bytes: int | None = None,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Prepare to find the peak on this machine's device, up to `limit_bytes`."""
        if limit_bytes is not None:
            check_whole(limit_bytes=limit_bytes)
        self._peak = 0
        self._on_cuda = this_machine().device == "cuda" and not dry()
        self._cuda_limit: _AllocatedLimit | None = None
        account_limit = limit_bytes
        if self._on_cuda and limit_bytes is not None:
            # CUDA's allocator knows more than the account: the scratch memory of operators.
            account_limit = None
            self._cuda_limit = _AllocatedLimit(limit_bytes, self._close_cuda_interval)
        self._recorder = None
        self._account: LiveBytes | TimelineRecorder | None = None
        if model is not None:
            self._recorder = TimelineRecorder(model, optimizer, limit_bytes=account_limit)
            self._account = self._recorder
        elif not self._on_cuda:
            self._account = LiveBytes(this_machine().device, limit_bytes=account_limit)

    @property
    def peak(self) -> int:
        """The largest number of live bytes so far."""
        if not self._on_cuda:
            return self._account.peak
        if self in self._open:
            return max(self._peak, torch.cuda.max_memory_allocated())
        return self._peak

    @property
    def current(self) -> int:
        """Live bytes now."""
        return torch.cuda.memory_allocated() if self._on_cuda else self._account.current

    @property
    def timeline(self) -> Timeline | None:
        """The bytes by kind and phase, after the block; None if the model was not named."""
        return None if self._recorder is None else self._recorder.timeline()

    def __enter__(self) -> PeakMemory:
        gc.collect()  # a dead reference cycle would count as alive
        if self._account is not None:
            self._account.__enter__()
        if self._on_cuda:
            self._close_cuda_interval()
            self._open.append(self)
        if self._cuda_limit is not None:
            self._cuda_limit.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._cuda_limit is not None:
            self._cuda_limit.__exit__(*error)
        if self._on_cuda:
            self._close_cuda_interval()
            self._open.remove(self)
        if self._account is not None:
            self._account.__exit__(*error)

    def _close_cuda_interval(self) -> None:
        """Credit every open context with the peak so far, then restart the device's counter."""
        for memory in self._open:
            memory._peak = memory.peak
        torch.cuda.reset_peak_memory_stats()


class _AllocatedLimit(TorchDispatchMode):
    """The operator that takes the GPU's tensors over `limit_bytes` raises torch.OutOfMemoryError.

    `restart_peak` is called after an operator that went over the limit, whose error was caught and
    whose tensors are gone.
    """

    def __init__(self, limit_bytes: int, restart_peak: Callable[[], Any]) -> None:
        super().__init__()
        self._limit = limit_bytes
        self._restart_peak = restart_peak

    def ignore_compile_internals(self) -> bool:
        """Asked by torch.compile, which otherwise compiles nothing inside of a dispatch mode."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operator; torch.OutOfMemoryError if the peak is over the limit."""
        if _peak_of_allocator() > self._limit:
            self._restart_peak()
        out = func(*args, **(kwargs or {}))
        peak = _peak_of_allocator()
        if peak > self._limit:
            raise torch.OutOfMemoryError(
                f"emulated out of memory: {peak:,} bytes of tensors were alive, "
                f"the limit is {self._limit:,}"
            )
        return out


def _peak_of_allocator() -> int:
    """`torch.cuda.max_memory_allocated`, which would sort all other statistics first."""
    statistics = torch.cuda.memory_stats_as_nested_dict()
    return statistics["allocated_bytes"]["all"]["peak"]
