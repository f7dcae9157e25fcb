"""The peak bytes of tensors on a CPU when blocks are compiled: asked of PyTorch's allocator.

The account of `live_bytes.py` sees tensors as operators return them. Compiled code calls no
operators for what it makes inside, and PyTorch compiles nothing under such an account: a compiled
block would run as it is, and the peak would be that of the plain block. So this one listens to the
allocator, which gives every tensor its memory:

    before       bytes of the storages that are alive, counted as `live_bytes.py` does
    inside       plus each allocation, minus each release, in the order of their times
    afterwards   the largest sum

PyTorch's profiler reports allocations and releases. It knows no size for what was allocated before
it began, so those storages are watched one by one. Scratch memory is what an operator takes and
gives back before it ends: a product in 16 bits packs a matrix, a sum of two dtypes copies one of
its tensors. It counts in neither account. On a GPU the allocator's own peak is right for compiled
code, too.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import profiler
from torch.utils._python_dispatch import TorchDispatchMode

from recipes_lib.core.measure.live_bytes import Listener, LiveBytes


class AllocatorPeak(Listener):
    """Context manager: `peak` and `current` in bytes of live tensors on a CPU, known after it.

    What was alive `before` counts as well. Run the step once outside: compiling allocates, too.
    Raises RuntimeError inside of another profiler: PyTorch runs one at a time.
    """

    def __init__(self) -> None:
        """Prepare the account of PyTorch's allocator, which its profiler keeps."""
        # Below this level the profiler's library prints two lines each time it starts and stops.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        named = _ExperimentalConfig(capture_overload_names=True)
        self._profile = profiler.profile(
            use_kineto=True, profile_memory=True, experimental_config=named
        )
        self._alive = LiveBytes("cpu", listener=self)
        self._changes: list[_ChangeOfBytes] = []
        self._inside = False
        self.before = 0
        self.current = 0
        self.peak = 0

    # --- what the account of the storages from before tells ---

    def changed(self, number: int, change: int) -> None:
        """A storage from before was released, while the allocator is watched."""
        if self._inside:
            self._changes.append(_ChangeOfBytes(time.time_ns(), change))

    # --- measuring ---

    def __enter__(self) -> AllocatorPeak:
        """Count what is alive, and begin to watch the allocator."""
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
        """Add up the changes that the allocator has made: they give the peak."""
        self._inside = False
        self._profile.__exit__(*error)
        self._alive.stop_watching()
        self._changes += _changes_in(self._profile)
        self.current = self.before
        self.peak = self.before
        for change in sorted(self._changes):
            self.current += change.bytes
            self.peak = max(self.peak, self.current)
        self._profile = None  # it holds every event of the step


class _ChangeOfBytes(NamedTuple):
    """At `time`, in nanoseconds since 1970, the live bytes changed by `bytes`."""

    time: int
    bytes: int


class _Allocation(NamedTuple):
    """Bytes at an address, taken or (below zero) released. `ends` is when its operator does."""

    time: int
    address: int
    bytes: int
    ends: int


def _changes_in(profile: profiler.profile) -> Iterator[_ChangeOfBytes]:
    """What the allocator gave out inside, and took back, but for scratch memory."""
    found = _allocations_in_profile(profile.kineto_results.experimental_event_tree())
    inside: dict[int, _Allocation] = {}  # by address, what is alive
    for each in sorted(found):
        if each.bytes > 0:
            inside[each.address] = each
        elif each.address in inside:  # else it is from before, and watched there
            taken = inside.pop(each.address)
            if each.time >= taken.ends:
                yield _ChangeOfBytes(taken.time, taken.bytes)
                yield _ChangeOfBytes(each.time, each.bytes)
    for each in inside.values():
        yield _ChangeOfBytes(each.time, each.bytes)


def _allocations_in_profile(roots: Iterable[Any]) -> Iterator[_Allocation]:
    """All that PyTorch's profiler saw taken and released on the CPU."""
    waiting = [(root, 0) for root in roots]
    while waiting:
        event, ends = waiting.pop()
        if event.name == "[memory]":
            _, details = event.typed
            if details.device.type == "cpu":
                yield _Allocation(event.start_time_ns, details.ptr, details.alloc_size, ends)
        elif not ends and _is_operator(event):
            ends = event.end_time_ns
        waiting.extend((child, ends) for child in event.children)


def _is_operator(event: Any) -> bool:
    """Whether an event of the profiler is an operator with code of its own, made of no others."""
    operator = event.name
    if event.overload_name:
        operator += f".{event.overload_name}"
    try:
        made_of_others = torch._C._dispatch_has_kernel_for_dispatch_key(
            operator, "CompositeImplicitAutograd"
        )
    except RuntimeError:  # no operator has this name
        return False
    return not made_of_others
