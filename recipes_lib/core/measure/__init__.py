"""Measure a step: seconds, tokens per second, the peak bytes of tensors, and their timeline.

"Peak bytes" means the same on both devices. On CUDA it is the allocator's own peak. On a CPU it is
that of an exact account of live storages (`live_bytes.py`).

allocated_limit  on a GPU, out of memory at so many bytes of tensors, as on a smaller one
allocator_peak  peak bytes of tensors where compiled code makes them
live_bytes  an exact account of the bytes of live tensors
machine  what am I running on: device, memory, native bf16, versions, tier
memory  what is free on the device, the host and in the container, and what the process keeps
operator_profile  seconds of a step by kind of operator
rates  how fast this device multiplies matrices and reads memory: the limits of a step
runs  where results are written, and what stands beside each: machine, versions, commit
timeline  memory over time: live bytes by kind and phase
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import _meta_registrations
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode

from recipes_lib.core.checks import check_whole
from recipes_lib.core.measure.allocated_limit import AllocatedLimit
from recipes_lib.core.measure.allocator_peak import AllocatorPeak
from recipes_lib.core.measure.live_bytes import LiveBytes
from recipes_lib.core.measure.machine import machine as this_machine
from recipes_lib.core.measure.machine import synchronize
from recipes_lib.core.measure.timeline import Timeline, TimelineRecorder
from recipes_lib.core.model.marks import COMPILED, any_marked


@dataclass(frozen=True)
class Measurement:
    """What one recipe costs.

    `seconds` of the fastest step, `peak_bytes` of tensors, the `result` of the last step, and the
    `timeline` of the step under the memory account, if the model was named. `seconds_high` are of
    the slowest step, if more than one was timed.
    """

    seconds: float
    peak_bytes: int
    tokens: int | None
    result: Any = None
    timeline: Timeline | None = None
    seconds_high: float | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """None, if nobody said how many tokens a step has."""
        return None if self.tokens is None else self.tokens / self.seconds

    def without(self, alive_before: int) -> Measurement:
        """The same step without the bytes of others that were alive before its model was built."""
        timeline = self.timeline
        if timeline is not None:
            timeline = timeline.without(alive_before)
        return replace(self, peak_bytes=self.peak_bytes - alive_before, timeline=timeline)


def bytes_alive() -> int:
    """Bytes of all tensors that are alive now."""
    with PeakMemory() as memory:
        return memory.current


def measure(
    step: Callable[[], Any],
    *,
    tokens: int | None = None,
    warmup: int = 1,
    repeats: int = 2,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Measurement:
    """Run `step` to warm up, then once under the memory account, then `repeats` times on the clock.

    The fastest of them counts: whatever else runs can only slow a step. The warm-up matters for
    memory too: AdamW allocates its states in the first step.

    Args:
        tokens: that one step trains on, for tokens per second.
        repeats: 0 takes the time of the step under the account, which slows it.
        model, optimizer: name them for the timeline. A model with compiled blocks has none: it is
            the allocator that knows their peak.
    Raises ValueError for negative counts; an error inside `step` passes through.
    """
    check_whole(warmup=warmup, repeats=repeats, least=0)
    if tokens is not None:
        check_whole(tokens=tokens)
    gc.collect()  # the model of the measurement before may hang in a reference cycle
    for _ in range(warmup):
        step()
    memory = _account_of(model, optimizer)
    with memory:
        under_account, result = timed(step)
    seconds = []
    for _ in range(repeats):
        took, result = timed(step)
        seconds.append(took)
    fastest = min(seconds, default=under_account)
    slowest = max(seconds) if len(seconds) > 1 else None
    timeline = getattr(memory, "timeline", None)  # an allocator's account has none
    return Measurement(fastest, memory.peak, tokens, result, timeline, slowest)


def _account_of(
    model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None
) -> PeakMemory | AllocatorPeak:
    """The account of the memory that sees this step as it is.

    Compiled blocks run as plain ones in an account of operators, so theirs is the allocator's.
    """
    if model is None or dry() or not any_marked(model.modules(), COMPILED):
        return PeakMemory(model=model, optimizer=optimizer)
    if this_machine().device == "cpu":
        return AllocatorPeak()
    return PeakMemory()  # without a timeline it asks CUDA's allocator, and nothing else


def in_turns(steps: dict[str, Callable[[], Any]], *, rounds: int = 3) -> dict[str, list[float]]:
    """Seconds of every step in `rounds` rounds, each round in the other direction.

    What slows the machine for a while then slows all of them. Warm up before, and compare the
    fastest of each. Raises ValueError for less than one round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for names in there_and_back(list(steps), rounds=rounds):
        for name in names:
            took, _ = timed(steps[name])
            seconds[name].append(took)
    return seconds


def there_and_back(names: list[str], *, rounds: int) -> Iterator[list[str]]:
    """The order of each round: as given, then reversed, then as given again.

    Raises ValueError for less than one round.
    """
    check_whole(rounds=rounds)
    for turn in range(rounds):
        forth = turn % 2 == 0
        yield names if forth else names[::-1]


def timed(step: Callable[[], Any]) -> tuple[float, Any]:
    """The seconds of one step, and what it returned."""
    synchronize()
    start = time.perf_counter()
    result = step()
    synchronize()
    return time.perf_counter() - start, result


@contextlib.contextmanager
def dry_run() -> Iterator[None]:
    """Inside, tensors have shapes and no data: operators cost no memory and hardly any time.

    `PeakMemory` counts the bytes that they would take, kernel by kernel as on this device. What
    reads a value raises an error.
    """
    from transformers import masking_utils

    # To skip the [S, S] mask, transformers looks at the positions for packed documents. There are
    # none to see.
    blind = mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None)
    grouped = mock.patch.object(
        _meta_registrations, "_meta_grouped_mm_common", _grouped_product, create=True
    )
    with FakeTensorMode(), blind, grouped, _out_of_the_collectors_sight():
        yield


def _grouped_product(
    rows: torch.Tensor, weights: torch.Tensor, *scales: Any, offs: Any = None, **ignored: Any
) -> torch.Tensor:
    """The product of rows and the weights of their experts, without data.

    PyTorch's own allows bf16 only, as its kernel on a GPU does. That on a CPU takes fp32 as well.
    """
    out_dtype = ignored.get("out_dtype")
    return _meta_registrations._create_grouped_mm_output_tensor(rows, weights, offs, out_dtype)


@contextlib.contextmanager
def _out_of_the_collectors_sight() -> Iterator[None]:
    """Let the collector forget the objects that are there, until the end of this context.

    `PeakMemory` walks through all objects to find the tensors that are alive. In a dry run only
    its fake tensors count, and they are made inside: older objects need no look. A search takes
    many dry steps, and the walk would be most of each.
    """
    if gc.get_freeze_count() > 0:  # somebody has done so before, and would lose it at our end
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def dry() -> bool:
    """True inside `dry_run`, where no value can be read."""
    return active_fake_mode() is not None


class PeakMemory:
    """Context manager: `peak` so far, and `current` while inside, in bytes of live tensors.

    What was alive before counts as well, as it does on a GPU. Contexts nest, and an error inside
    the block leaves no hook behind.

        with PeakMemory() as memory:
            loss.backward()
        print(memory.peak)

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
        if limit_bytes is not None:
            check_whole(limit_bytes=limit_bytes)
        self._peak = 0
        self._on_cuda = this_machine().device == "cuda" and not dry()
        self._cuda_limit: AllocatedLimit | None = None
        account_limit = limit_bytes
        if self._on_cuda and limit_bytes is not None:
            # CUDA's allocator knows more than the account: the scratch memory of operators.
            account_limit = None
            self._cuda_limit = AllocatedLimit(limit_bytes, restart_peak=self._close_cuda_interval)
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
