"""Two lanes of one step under DDP: what computes when, and what is sent meanwhile.

    recorder = LaneRecorder(wrapper)
    step()                                  # the first step arranges the buckets
    lanes = recorder.record(step)
    lanes.exposed_seconds                   # communication that nothing hides

The compute lane is cut where a block begins: its forward when hidden states come in, its backward
when the gradient of its output arrives. The last gradient of the model ends it, and what follows is
waiting. The communication lane has one interval for each bucket, from the moment when it is full to
the moment when its average is there. Buckets that wait for others on the way count from when they
are full.

On a GPU the moments are events in the stream of the work, not times of the Python that queues it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from recipes_lib.core.model.causal_lm import decoder_blocks

WAITING = "waiting for the buckets, and the optimizer"
HEAD = "output layer and loss, forward and backward"
Moment = Any  # seconds on a CPU, an event on a GPU


@dataclass(frozen=True)
class Interval:
    """One piece of a lane: seconds since the first forward began."""

    name: str
    start: float
    end: float
    size: int = 0  # bytes of a bucket


@dataclass(frozen=True)
class Lanes:
    """One step of one rank."""

    compute: list[Interval]
    communication: list[Interval]

    @property
    def last_gradient(self) -> float:
        """Seconds until the last gradient of the model was there."""
        return max(part.end for part in self.compute if part.name != WAITING)

    @property
    def communication_seconds(self) -> float:
        """Seconds in which at least one bucket was on its way."""
        return _covered(self.communication)

    @property
    def exposed_seconds(self) -> float:
        """Those of them after the last gradient, with nothing to compute meanwhile."""
        late = []
        for part in self.communication:
            if part.end > self.last_gradient:
                start = max(part.start, self.last_gradient)
                late.append(Interval(part.name, start, part.end, part.size))
        return _covered(late)

    @property
    def hidden_share(self) -> float:
        """The share of the communication that runs beside backward, from 0 to 1."""
        if self.communication_seconds == 0:
            return 0.0
        return 1 - self.exposed_seconds / self.communication_seconds


def _covered(parts: list[Interval]) -> float:
    """Seconds that the intervals cover together."""
    covered = 0.0
    reached = 0.0
    for part in sorted(parts, key=_start):
        covered += max(0.0, part.end - max(part.start, reached))
        reached = max(reached, part.end)
    return covered


def _start(part: Interval) -> float:
    return part.start


class LaneRecorder:
    """Records steps of one DDP wrapper. It stays in the wrapper: PyTorch allows one hook, for good.

    While nothing is recorded the hook averages a bucket as DDP itself does. Raises ValueError for a
    model that is not wrapped by DDP, and for one that has a hook already.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        if not isinstance(model, DistributedDataParallel):
            raise ValueError(
                f"{type(model).__name__} has no buckets: give what apply_data_parallel returned"
            )
        if model._comm_hooks:
            raise ValueError(
                "this model has a communication hook already: use the LaneRecorder that it has, or "
                "wrap the model again"
            )
        self._model = weakref.proxy(model)  # the wrapper holds the hook, and the hook this
        self._device = next(model.parameters()).device
        self._moments: list[tuple[str, Moment]] | None = None  # None while nothing is recorded
        self._last_gradient: Moment = None
        self._buckets: list[tuple[str, Moment, int]] = []
        self._arrived: dict[str, Moment] = {}
        model.register_comm_hook(self, _average)

    def record(self, step: Callable[[], Any]) -> Lanes:
        """Run `step`, which trains the wrapper with one or more micro-batches, and record it.

        Run one step before the first recorded one: DDP arranges its buckets after it.
        """
        self._moments = []
        self._buckets = []
        self._arrived = {}
        handles = list(self._hooks())
        try:
            step()
            self._end_of_backward()
            end = self._now()
            return self._lanes(end)
        finally:
            self._moments = None
            for handle in handles:
                handle.remove()

    # --- moments of the compute lane

    def _hooks(self) -> Iterator[Any]:
        blocks = decoder_blocks(self._model.module)
        yield self._model.register_forward_pre_hook(self._begin_forward)
        for number, block in enumerate(blocks):
            name = f"block {number}"
            yield block.register_forward_pre_hook(self._stamp_forward(f"forward {name}"))
            yield block.register_forward_hook(
                self._stamp_backward(f"backward {name}", is_last=block is blocks[-1])
            )
        for parameter in self._model.module.parameters():
            if parameter.requires_grad:
                yield parameter.register_post_accumulate_grad_hook(self._gradient_arrived)

    def _begin_forward(self, *_: Any) -> None:
        self._end_of_backward()  # of the micro-batch before
        self._stamp("forward embedding")

    def _stamp_forward(self, name: str) -> Callable[..., None]:
        def before(*_: Any) -> None:
            self._stamp(name)

        return before

    def _stamp_backward(self, name: str, *, is_last: bool) -> Callable[..., None]:
        def after(block: Any, inputs: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if is_last:
                self._stamp(HEAD)
            if hidden.requires_grad:
                hidden.register_hook(gradient_arrives)

        def gradient_arrives(gradient: torch.Tensor) -> None:
            self._stamp(name)

        return after

    def _gradient_arrived(self, parameter: torch.Tensor) -> None:
        self._last_gradient = self._now()

    def _end_of_backward(self) -> None:
        """What follows the last gradient is waiting, until something else begins."""
        if self._last_gradient is not None:
            self._moments.append((WAITING, self._last_gradient))
            self._last_gradient = None

    def _stamp(self, name: str) -> None:
        if self._moments is not None:
            self._moments.append((name, self._now()))

    def _now(self) -> Moment:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.perf_counter()

    # --- the record

    def _lanes(self, end: Moment) -> Lanes:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        begin = self._moments[0][1]
        compute = []
        following = [*self._moments[1:], ("end", end)]
        for (name, start), (_, stop) in zip(self._moments, following):
            compute.append(Interval(name, _seconds(begin, start), _seconds(begin, stop)))
        communication = []
        for name, start, size in self._buckets:
            stop = self._arrived[name]
            communication.append(
                Interval(name, _seconds(begin, start), _seconds(begin, stop), size)
            )
        return Lanes(compute, communication)


def _seconds(begin: Moment, moment: Moment) -> float:
    if isinstance(begin, float):
        return moment - begin
    return begin.elapsed_time(moment) / 1000


def _average(recorder, bucket):  # type hints as text, which this file has, DDP refuses
    """DDP's hook for a bucket that is full: start its all-reduce, and say when it has come."""
    gradients = bucket.buffer()
    group = recorder._model.process_group
    name = f"bucket {bucket.index()}"
    recording = recorder._moments is not None
    if recording:
        size = gradients.numel() * gradients.element_size()
        recorder._buckets.append((name, recorder._now(), size))
    gradients /= distributed.get_world_size(group)
    work = distributed.all_reduce(gradients, group=group, async_op=True)

    def arrived(future: torch.futures.Future) -> torch.Tensor:
        if recording:
            recorder._arrived[name] = recorder._now()
        return gradients

    return work.get_future().then(arrived)
