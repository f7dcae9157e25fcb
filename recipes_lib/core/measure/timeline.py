"""Memory over time: the live bytes of a training step after each operator, by kind and phase.

    timeline = record_timeline(step, model=model, optimizer=optimizer)
    timeline.peak                 bytes at the highest point
    timeline.at_peak()            what they consist of: {"weights": …, "states": …, …}
    report.charts.memory_timeline.timeline_chart({"baseline": timeline})

A number for the peak says how much. The timeline says when, and of what:

    weights      parameters and buffers of the model, scales of quantized ones included
    states       what the optimizer keeps from step to step
    gradients    what becomes a parameter's `.grad`, from the moment at which backward makes it
    activations  what forward makes while autograd records, or a checkpoint makes again
    other        everything else: inputs, gradients of activations, what a loss or an optimizer
                 makes inside, and what was there before

A storage has one kind for its whole life. Which one is known at the latest when the step is over: a
tensor that ends as `.grad` was a gradient from the start.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from recipes_lib.core.measure.live_bytes import Listener, LiveBytes, in_backward
from recipes_lib.core.measure.machine import machine
from recipes_lib.core.model.bytes_of_tensors import (
    plain_tensors,
    quantization_tensors,
    state_tensors,
)

KINDS = ("weights", "states", "gradients", "activations", "other")
NEAR = 1 / 20  # of the operators of backward: so many belong to one of its ends


@dataclass(frozen=True)
class Point:
    """After operator number `operator`, in `phase`: the live bytes of each kind."""

    operator: int
    phase: str
    bytes: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


TOTAL = attrgetter("total")


@dataclass(frozen=True)
class Timeline:
    """The points of a step, in their order; between two points nothing changes."""

    points: list[Point]

    @property
    def peak(self) -> int:
        """Live bytes at the highest point."""
        return self.highest.total

    @property
    def highest(self) -> Point:
        """The first of the highest points."""
        return max(self.points, key=TOTAL)

    def at_peak(self) -> dict[str, int]:
        """What the peak consists of, by kind."""
        return dict(self.highest.bytes)

    def towers(self) -> tuple[Point, Point]:
        """The timeline's highest point until the last backward has begun, and where it ends."""
        backward = [phase for phase in self.phases() if phase[0] == "backward"]
        _, begin, end = backward[-1]
        near = NEAR * (end - begin)
        until_end = [point for point in self.points if point.operator < end]
        first = [point for point in until_end if point.operator <= begin + near]
        last = [point for point in until_end if point.operator >= until_end[-1].operator - near]
        return max(first, key=TOTAL), max(last, key=TOTAL)

    def without(self, others: int) -> Timeline:
        """The timeline without `others` bytes of the kind "other", alive all the time."""
        points = []
        for point in self.points:
            other = point.bytes["other"] - others
            points.append(replace(point, bytes={**point.bytes, "other": other}))
        return Timeline(points)

    def with_states_from_the_start(self) -> Timeline:
        """The timeline of a later step, from that of the first one, which makes the states.

        What the optimizer keeps is then there all the time, and all else is the same.
        """
        states = self.points[-1].bytes["states"]
        points = []
        for point in self.points:
            points.append(replace(point, bytes={**point.bytes, "states": states}))
        return Timeline(points)

    def phases(self) -> list[tuple[str, int, int]]:
        """Phases of the timeline as (name, first operator, operator where the next begins).

        Accumulation repeats forward and backward.
        """
        begins = []
        for point in self.points:
            if not begins or begins[-1][0] != point.phase:
                begins.append((point.phase, point.operator))
        ends = [operator for _, operator in begins[1:]] + [self.points[-1].operator]
        return [(phase, begin, end) for (phase, begin), end in zip(begins, ends, strict=True)]


def record_timeline(
    step: Callable[[], Any],
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
) -> Timeline:
    """Run `step` once and record its timeline.

    AdamW makes its states in the first step: take one step before. It works alike on a CPU, on
    a GPU and in a dry run (on a model that was made in it), because the account is of tensors, not
    of what an allocator rounds up or keeps. It does not see what compiled code allocates inside.
    Compiled blocks run as plain ones here.
    """
    gc.collect()  # a dead reference cycle would count as alive
    recorder = TimelineRecorder(model, optimizer)
    with recorder:
        step()
    return recorder.timeline()


class _SampleOfBytes(NamedTuple):
    """What is noted after an operator. The kinds are added up at the end, when all are known."""

    operator: int
    phase: str
    changes: int  # how many of the recorder's changes have happened by now


class TimelineRecorder(Listener):
    """Records while inside; `timeline()` afterwards, `peak` and `current` at any time."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        limit_bytes: int | None = None,
    ) -> None:
        """Prepare the timeline of steps of `model`, whose bytes get their kinds."""
        self._model = weakref.ref(model)
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self.account = LiveBytes(machine().device, limit_bytes=limit_bytes, listener=self)
        self._kinds: dict[int, str] = {}  # of each storage, by its number in the account
        self._changes: list[tuple[int, int]] = []  # (number of the storage, change of its bytes)
        self._samples: list[_SampleOfBytes] = []
        self._operators = 0
        self._phase = "forward"
        self._stepping = False
        self._thread = threading.current_thread()  # of the loop
        self._recording = False
        self._handles: list[Any] = []  # of the hooks that are there while it records

    # --- what the account tells ---

    def changed(self, number: int, change: int) -> None:
        """Note a storage's change for the timeline. A new one gets a kind for the time being."""
        self._changes.append((number, change))
        if number in self._kinds:
            return
        self._kinds[number] = "other"
        if self._recording and torch.is_grad_enabled():
            # Autograd records: this is forward, or a checkpoint that repeats it in backward.
            self._kinds[number] = "activations"
            if not in_backward() and not self._stepping:
                self._phase = "forward"

    def operator_ended(self) -> None:
        self._operators += 1
        if in_backward():
            self._phase = "backward"
        elif self._stepping:
            self._phase = "step"
        self._sample()

    def _sample(self) -> None:
        """Add a point to the timeline, if anything has changed since the last one."""
        # The changes are all that is noted. The account's bytes might be those of another moment:
        # the garbage collector, or another thread, can free a storage between any two lines.
        sample = _SampleOfBytes(self._operators, self._phase, len(self._changes))
        if self._samples:
            last = self._samples[-1]
            if last.changes == sample.changes and last.phase == sample.phase:
                return  # nothing has happened since
        self._samples.append(sample)

    # --- recording ---

    def __enter__(self) -> TimelineRecorder:
        """Label what is there, and begin to record the timeline."""
        self.account.__enter__()
        self._label_what_is_there()
        # No attribute may hold a parameter: the block is free to drop the model.
        for parameter in self._model().parameters():
            if parameter.requires_grad:
                self._handles.append(_hook_before_others(parameter, self._label_gradient))
        self._handles.append(register_optimizer_step_pre_hook(self._step_begins))
        self._handles.append(register_optimizer_step_post_hook(self._step_ends))
        self._recording = True
        self._sample()
        return self

    def __exit__(self, *error: Any) -> None:
        self._recording = False
        self._label_what_is_there()  # states that the step has made
        self._sample()
        for handle in self._handles:
            handle.remove()
        self.account.__exit__(*error)

    def _label_what_is_there(self) -> None:
        # The block may have dropped them: then their tensors have the kinds that they had before.
        model = self._model()
        if model is not None:
            self._label_model(model)
        optimizer = None
        if self._optimizer is not None:
            optimizer = self._optimizer()
        if optimizer is not None:
            self._label_storage(state_tensors(optimizer), "states")

    def _label_model(self, model: torch.nn.Module) -> None:
        """Label the bytes of a model for the timeline: weights, scales, gradients."""
        self._label_storage([*model.parameters(), *model.buffers()], "weights")
        for parameter in model.parameters():
            self._label_storage(quantization_tensors(parameter), "weights")
        self._label_gradients(model)

    def _label_gradients(self, model: torch.nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                self._label_storage([parameter.grad], "gradients")

    def _label_storage(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        for tensor in tensors:
            for part in plain_tensors(tensor):
                number = self.account.see(part)
                if number is not None:
                    self._kinds[number] = kind

    def _label_gradient(self, parameter: torch.Tensor) -> None:
        """Label it for the timeline when it is complete, before anybody frees it."""
        self._label_storage([parameter.grad], "gradients")

    def _step_begins(self, *_: Any) -> None:
        if self._in_a_worker():
            return
        self._stepping = True
        model = self._model()
        if model is not None:
            self._label_gradients(model)  # DDP has moved them into its buckets by now

    def _step_ends(self, *_: Any) -> None:
        if not self._in_a_worker():
            self._stepping = False

    def _in_a_worker(self) -> bool:
        """Whether an optimizer steps in its own thread: beside backward, which frees gradients."""
        return threading.current_thread() is not self._thread and not in_backward()

    # --- the result ---

    @property
    def peak(self) -> int:
        return self.account.peak

    @property
    def current(self) -> int:
        return self.account.current

    def timeline(self) -> Timeline:
        """The points of the timeline: changes added up, under the kind of their storage."""
        live = dict.fromkeys(KINDS, 0)
        points = []
        done = 0
        for sample in self._samples:
            for number, change in self._changes[done : sample.changes]:
                live[self._kinds[number]] += change
            done = sample.changes
            points.append(Point(sample.operator, sample.phase, dict(live)))
        return Timeline(points)


def _hook_before_others(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """The timeline labels a gradient before an optimizer that steps in backward frees it."""
    handle = parameter.register_post_accumulate_grad_hook(hook)
    hooks = parameter._post_accumulate_grad_hooks
    *earlier, last = hooks.items()
    # Autograd reads the order of insertion, which `move_to_end` does not change.
    hooks.clear()
    hooks.update([last, *earlier])
    return handle
