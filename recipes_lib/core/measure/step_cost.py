"""What a step costs: seconds of the fastest one, peak bytes of tensors, and their timeline."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from recipes_lib.core.measure.allocator_peak import AllocatorPeak
from recipes_lib.core.measure.dry_run import dry
from recipes_lib.core.measure.machine import machine as this_machine
from recipes_lib.core.measure.machine import synchronize
from recipes_lib.core.measure.peak_memory import PeakMemory
from recipes_lib.core.measure.timeline import Timeline
from recipes_lib.core.model.marks import COMPILED, any_marked


@dataclass(frozen=True)
class Measurement:
    """What a step of one recipe costs."""

    seconds: float  # of the fastest step
    peak_bytes: int  # of tensors
    result: Any = None  # of the last step
    timeline: Timeline | None = None  # if the model was named

    def without(self, alive_before: int) -> Measurement:
        """The cost of a step without the bytes of others, alive before its model was built."""
        timeline = self.timeline
        if timeline is not None:
            timeline = timeline.without(alive_before)
        return replace(self, peak_bytes=self.peak_bytes - alive_before, timeline=timeline)


def measure(
    step: Callable[[], Any],
    *,
    warmup: int = 1,
    repeats: int = 2,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Measurement:
    """What a step costs: warm up, one run under the memory account, `repeats` on the clock.

    The fastest of them counts: whatever else runs can only slow a step. The warm-up matters for
    memory too: AdamW allocates its states in the first step.

    Args:
        repeats: 0 takes the time of the step under the account, which slows it.
        model, optimizer: name them for the timeline. A model with compiled blocks has none: it is
            the allocator that knows their peak.
    """
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
    timeline = getattr(memory, "timeline", None)  # an allocator's account has none
    return Measurement(fastest, memory.peak, result, timeline)


def _account_of(
    model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None
) -> PeakMemory | AllocatorPeak:
    """The account of the memory that measures the cost of this step as it is.

    Compiled blocks run as plain ones in an account of operators, so theirs is the allocator's.
    """
    if model is None or dry() or not any_marked(model.modules(), COMPILED):
        return PeakMemory(model=model, optimizer=optimizer)
    if this_machine().device == "cpu":
        return AllocatorPeak()
    return PeakMemory()  # without a timeline it asks CUDA's allocator, and nothing else


def timed(step: Callable[[], Any]) -> tuple[float, Any]:
    """The seconds of one step, and what it returned."""
    synchronize()
    start = time.perf_counter()
    result = step()
    synchronize()
    return time.perf_counter() - start, result
