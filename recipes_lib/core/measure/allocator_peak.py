"""The peak bytes of tensors on a CPU when blocks are compiled: asked of PyTorch's allocator.

The account of `live_bytes.py` sees tensors as operators return them. Compiled code calls no
operators for what it makes inside, and PyTorch compiles nothing under such an account: a compiled
block would run as it is, and the peak would be that of the plain block. So this one listens to the
allocator, which gives every tensor its memory:

    before       bytes of the storages that are alive, counted as `live_bytes.py` does
    inside       plus each allocation, minus each release, in the order of their times
    afterwards   the largest sum

PyTorch's profiler reports allocations and releases. It knows no size for what was allocated before
it began, so those storages are watched one by one. Scratch memory inside of operators counts here,
as it does on a GPU. There the allocator's own peak is right for compiled code too.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd import profiler
from torch.utils._python_dispatch import TorchDispatchMode

from recipes_lib.core.measure.live_bytes import LiveBytes


class AllocatorPeak:
    """Context manager: `peak` and `current` in bytes of live tensors on a CPU, known after it.

    What was alive `before` counts as well. Run the step once outside: compiling allocates, too.
    Raises RuntimeError inside of another profiler: PyTorch runs one at a time.
    """

    def __init__(self) -> None:
        # Below this level the profiler's library prints two lines each time it starts and stops.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self._profile = profiler.profile(use_kineto=True, profile_memory=True)
        self._alive = LiveBytes("cpu", listener=self)
        self._changes: list[_Change] = []
        self._inside = False
        self.before = 0
        self.current = 0
        self.peak = 0

    # --- what the account of the storages from before tells ---

    def changed(self, number: int, change: int) -> None:
        """A storage from before was released."""
        if self._inside:
            self._changes.append(_Change(time.time_ns(), change))

    def operator_ended(self) -> None:
        """Nothing to do: no operator is watched."""

    # --- measuring ---

    def __enter__(self) -> AllocatorPeak:
        if torch.autograd._profiler_enabled():
            raise RuntimeError(
                "a profiler of PyTorch is active, and this account would end it, because it is one "
                "itself: measure the memory of compiled blocks before the profiler or after it"
            )
        gc.collect()  # a dead reference cycle would count as alive
        self._alive.__enter__()
        # It has counted what is alive. From here on it sees no operator, and still each storage
        # that is released.
        TorchDispatchMode.__exit__(self._alive, None, None, None)
        self.before = self._alive.current
        self._profile.__enter__()
        self._inside = True
        return self

    def __exit__(self, *error: Any) -> None:
        self._inside = False
        self._profile.__exit__(*error)
        self._alive.stop_watching()
        self._changes += _allocations(self._profile)
        self.current = self.before
        self.peak = self.before
        for change in sorted(self._changes):
            self.current += change.bytes
            self.peak = max(self.peak, self.current)
        self._profile = None  # it holds every event of the step


class _Change(NamedTuple):
    """At `time`, in nanoseconds since 1970, the live bytes changed by `bytes`."""

    time: int
    bytes: int


def _allocations(profile: profiler.profile) -> Iterator[_Change]:
    """What was allocated inside, and released again."""
    events = []
    for event in _every_event(profile.kineto_results.experimental_event_tree()):
        if event.name == "[memory]":
            _, details = event.typed
            if details.device.type == "cpu":
                events.append((event.start_time_ns, details.ptr, details.alloc_size))
    inside = set()
    for when, address, size in sorted(events, key=lambda event: event[0]):
        if size > 0:
            inside.add(address)
            yield _Change(when, size)
        elif address in inside:  # else it is from before, and watched there
            inside.remove(address)
            yield _Change(when, size)


def _every_event(roots: Iterable[Any]) -> Iterator[Any]:
    waiting = list(roots)
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        yield event
