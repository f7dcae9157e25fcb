"""Two lanes of one step under DDP: what computes when, and what is sent meanwhile.

    recorder = LaneRecorder(wrapper)
    step()                                  # the first step arranges the buckets
    lanes = recorder.record(step)
    lanes.hidden_share                      # of the communication, beside backward

The compute lane is cut where a block begins: its forward when hidden states come in, its backward
when the gradient of its output arrives. The communication lane has an interval for each bucket,
from when it is full to when its average is there. The last bucket is full with the last gradient,
which ends the computing: what follows is waiting. On a GPU the moments are events in the stream of
the work.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from recipes_lib.core.measure.machine import synchronize
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.parallel._moments import Moment, moment_now, seconds_between

WAITING = "waiting for the buckets, and the optimizer"
HEAD = "output layer and loss, forward and backward"


@dataclass(frozen=True)
class Interval:
    """One piece of a lane: seconds since the first forward began."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Lanes:
    """One step of one rank."""

    compute: list[Interval]
    communication: list[Interval]

    @property
    def hidden_share(self) -> float:
        """The share of the communication that runs beside backward, from 0 to 1."""
        last_gradient = max(part.end for part in self.compute if part.name != WAITING)
        spans = [(part.start, part.end) for part in self.communication]
        late = [(max(start, last_gradient), end) for start, end in spans if end > last_gradient]
        return 1 - _covered(late) / _covered(spans)


def _covered(spans: list[tuple[float, float]]) -> float:
    """Seconds that the spans of a lane cover together."""
    covered = 0.0
    reached = 0.0
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


class LaneRecorder:
    """Records steps of one micro-batch of a DDP wrapper.

    It stays in the wrapper, where PyTorch allows one hook, for good. While nothing is recorded the
    hook averages a bucket as DDP itself does.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        """Prepare to record the lanes of a wrapper of DDP: its buckets call a hook."""
        self._model = weakref.proxy(model)  # the wrapper holds the hook, and the hook this
        self._device = next(model.parameters()).device
        self._moments: list[tuple[str, Moment]] | None = None  # None while nothing is recorded
        self._buckets: list[tuple[str, Moment]] = []
        self._arrived: dict[str, Moment] = {}
        model.register_comm_hook(self, _timed_all_reduce)

    def record(self, step: Callable[[], Any]) -> Lanes:
        """Run `step`, which trains the wrapper, and record its lanes.

        Run one step before the first recorded one: DDP arranges its buckets after it.
        """
        self._moments = []
        self._buckets = []
        self._arrived = {}
        handles = list(self._hooks_of_step())
        try:
            step()
            _, last_gradient = self._buckets[-1]
            self._moments.append((WAITING, last_gradient))
            return self._lanes(self._now())
        finally:
            self._moments = None
            for handle in handles:
                handle.remove()

    # --- moments of the compute lane

    def _hooks_of_step(self) -> Iterator[Any]:
        """Where the moments of the compute lane are noted: blocks, forward and backward."""
        blocks = decoder_blocks(self._model.module)
        yield self._model.register_forward_pre_hook(self._stamp_forward("forward embedding"))
        for number, block in enumerate(blocks):
            yield block.register_forward_pre_hook(self._stamp_forward(f"forward block {number}"))
            yield block.register_forward_hook(self._stamp_backward(f"backward block {number}"))
        yield blocks[-1].register_forward_hook(self._stamp_forward(HEAD))

    def _stamp_forward(self, name: str) -> Callable[..., None]:
        def here(*_: Any) -> None:
            self._moments.append((name, self._now()))

        return here

    def _stamp_backward(self, name: str) -> Callable[..., None]:
        """Note in the compute lane when backward reaches this block."""

        def after_forward(block: Any, inputs: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            hidden.register_hook(self._stamp_forward(name))

        return after_forward

    def _now(self) -> Moment:
        return moment_now(self._device)

    # --- the record

    def _lanes(self, end: Moment) -> Lanes:
        """Both lanes, in seconds since the first forward began."""
        synchronize()
        begin = self._moments[0][1]
        compute = []
        following = [*self._moments[1:], ("end", end)]
        for (name, start), (_, stop) in zip(self._moments, following):
            compute.append(
                Interval(name, seconds_between(begin, start), seconds_between(begin, stop))
            )
        communication = []
        for name, start in self._buckets:
            stop = seconds_between(begin, self._arrived[name])
            communication.append(Interval(name, seconds_between(begin, start), stop))
        return Lanes(compute, communication)


def _timed_all_reduce(recorder, bucket):  # type hints as text, which this file has, DDP refuses
    """DDP's hook for a bucket that is full: start its all-reduce, and say when it has come."""
    gradients = bucket.buffer()
    group = recorder._model.process_group
    name = f"bucket {bucket.index()}"
    recording = recorder._moments is not None
    if recording:
        recorder._buckets.append((name, recorder._now()))
    gradients /= distributed.get_world_size(group)
    work = distributed.all_reduce(gradients, group=group, async_op=True)

    def all_reduced(future: torch.futures.Future) -> torch.Tensor:
        if recording:
            recorder._arrived[name] = recorder._now()
        return gradients

    return work.get_future().then(all_reduced)
