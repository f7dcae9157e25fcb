"""Measure a step: median seconds, tokens per second, and the peak bytes of tensors.

"Peak bytes" means the same on both devices. On CUDA it is the allocator's own peak. On a CPU the
resident set size is useless (the C allocator keeps and reuses pages), so `PeakMemory` keeps an exact
account: it starts from every tensor alive, adds each new storage that an operator returns, and
subtracts it when the storage dies. Scratch buffers inside an operator's C++ code are not tensors
and are not seen.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recipes_lib.core.machine import machine, synchronize


@dataclass(frozen=True)
class Measurement:
    """What one recipe costs: `seconds` per step (median), `peak_bytes` of tensors, `result` of the last step."""

    seconds: float
    peak_bytes: int
    tokens: int | None
    result: Any = None

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.tokens else None


def measure(
    step: Callable[[], Any], *, tokens: int | None = None, warmup: int = 1, repeats: int = 2
) -> Measurement:
    """Run `step` to warm up, then once under the memory account, then `repeats` times on the clock.

    The warm-up matters for memory too: AdamW allocates its states in the first step.

    Args:
        tokens: that one step trains on, for tokens per second.
        repeats: 0 takes the time of the step under the account, which slows it.
    Raises ValueError for negative counts; an error inside `step` passes through.
    """
    if warmup < 0 or repeats < 0:
        raise ValueError(f"warmup={warmup}, repeats={repeats}: give counts of 0 or more")
    gc.collect()  # the model of the measurement before may hang in a reference cycle
    for _ in range(warmup):
        step()
    seconds = []

    def timed() -> Any:
        synchronize()
        start = time.perf_counter()
        result = step()
        synchronize()
        seconds.append(time.perf_counter() - start)
        return result

    with PeakMemory() as memory:
        result = timed()
    for _ in range(repeats):
        result = timed()
    return Measurement(statistics.median(seconds[1:] or seconds), memory.peak, tokens, result)


def in_turns(steps: dict[str, Callable[[], Any]], *, rounds: int = 3) -> dict[str, list[float]]:
    """Seconds of every step in `rounds` rounds, each round in the other direction: what slows the machine for a
    while slows all of them. Warm up before, and compare by the median. Raises ValueError for less than one round."""
    if rounds < 1:
        raise ValueError(f"rounds={rounds}: give 1 or more")
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        for name in steps if turn % 2 == 0 else reversed(steps):
            synchronize()
            start = time.perf_counter()
            steps[name]()
            synchronize()
            seconds[name].append(time.perf_counter() - start)
    return seconds


@contextlib.contextmanager
def dry_run() -> Iterator[None]:
    """Inside, tensors have shapes but no data: operators cost no memory and hardly any time, and `PeakMemory` counts
    the bytes that they would take, kernel by kernel as on this device. What reads a value raises an error."""
    from transformers import masking_utils

    # To skip the [S, S] mask, transformers looks at the positions for packed documents. There are none to see.
    blind = mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None)
    with FakeTensorMode(), blind:
        yield


def dry() -> bool:
    """True inside `dry_run`, where no value can be read."""
    return active_fake_mode() is not None


class PeakMemory:
    """Context manager: `peak` so far, and `current` while inside, in bytes of live tensors on this machine's device.

    What was alive before counts as well, as it does on a GPU. Contexts nest, and an error inside the
    block leaves no hook behind. With `limit_bytes` the block runs as on a smaller device: the operator
    that goes over it raises `torch.OutOfMemoryError`.

        with PeakMemory() as memory:
            loss.backward()
        print(memory.peak)
    """

    _open: list[PeakMemory] = []  # noqa: RUF012  (shared on purpose: the CUDA peak counter is one per device)

    def __init__(self, *, limit_bytes: int | None = None) -> None:
        if limit_bytes is not None and limit_bytes <= 0:
            raise ValueError(
                f"limit_bytes={limit_bytes}: give a positive number of bytes, or None for no limit"
            )
        self._peak = 0
        self._limit = limit_bytes
        self._account = _LiveBytes(limit_bytes) if dry() or machine().device == "cpu" else None

    @property
    def peak(self) -> int:
        if self._account:
            return self._account.peak
        return (
            max(self._peak, torch.cuda.max_memory_allocated()) if self in self._open else self._peak
        )

    @property
    def current(self) -> int:
        return self._account.current if self._account else torch.cuda.memory_allocated()

    def __enter__(self) -> PeakMemory:
        gc.collect()  # a dead reference cycle would count as alive
        if self._account:
            self._account.__enter__()
        else:
            self._close_cuda_interval()
            self._open.append(self)
            self._cap_cuda(self._limit)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._account:
            self._account.__exit__(*error)
        else:
            self._close_cuda_interval()
            self._open.remove(self)
            if self._limit:
                outer = [memory._limit for memory in self._open if memory._limit]
                self._cap_cuda(outer[-1] if outer else machine().memory_bytes)

    @staticmethod
    def _cap_cuda(limit: int | None) -> None:
        if limit is not None:
            torch.cuda.empty_cache()  # cached blocks count against the cap
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / machine().memory_bytes))

    def _close_cuda_interval(self) -> None:
        """Credit every open context with the peak so far, then restart the device's counter."""
        for memory in self._open:
            memory._peak = memory.peak
        torch.cuda.reset_peak_memory_stats()


class _LiveBytes(TorchDispatchMode):
    """Account of the live CPU storages: every operator's outputs pass through `__torch_dispatch__`."""

    def __init__(self, limit: int | None) -> None:
        super().__init__()
        self._limit, self._mode = limit, active_fake_mode()
        self.current = self.peak = 0

    def __enter__(self) -> _LiveBytes:
        self._sizes: dict[int, int] = {}
        self._finalizers: dict[int, weakref.finalize] = {}
        self.current = 0
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor):
                self._see(thing)
                if (
                    thing.is_leaf and thing.grad is not None
                ):  # until it is read, the collector does not know it
                    self._see(thing.grad)
        self.peak = self.current
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for finalizer in self._finalizers.values():
            finalizer.detach()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)
        self.peak = max(self.peak, self.current)
        if self._limit is not None and self.current > self._limit:
            raise torch.OutOfMemoryError(
                f"emulated out of memory: {self.current:,} bytes of tensors are alive, the limit is {self._limit:,}"
            )
        return out

    def _see(self, tensor: torch.Tensor) -> None:
        # A dry run counts its own fake tensors; those of torch.compile hold no memory.
        if tensor.layout != torch.strided or getattr(tensor, "fake_mode", None) is not self._mode:
            return
        storage = tensor.untyped_storage()
        if storage.device.type != ("meta" if self._mode else "cpu"):
            return
        key, size = storage._cdata, storage.nbytes()
        known = self._sizes.get(key)
        if known is None:
            # torch keeps a storage's Python object alive exactly as long as the storage itself.
            self._finalizers[key] = weakref.finalize(storage, self._forget, key)
            self._finalizers[key].atexit = False
        if known != size:  # new, or resized in place
            self._sizes[key] = size
            self.current += size - (known or 0)

    def _forget(self, key: int) -> None:
        self.current -= self._sizes.pop(key)
        del self._finalizers[key]
