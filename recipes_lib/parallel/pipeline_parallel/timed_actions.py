"""The grid of a pipeline: which rank computed what from when to when, and what of it is idle.

    time ->          0   1   2   3   4   5   6   7   8   9  10  11
    rank 0, stage 0  F0  F1   .   .  B0  B0  F2  B1  B1   .  B2  B2
    rank 1, stage 1   .  F0  B0  B0  F1  B1  B1  F2  B2  B2   .   .

Each cell is an `Action`. The bubble is the idle part of the time of all ranks.

All ranks count from the moment at which rank 0 began: each knows from the time of day how much
later it began itself. So machines differ by what their clocks differ. On a GPU events are recorded,
and nothing waits for them within the step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import distributed
from torch.distributed.pipelining import PipelineStage

from recipes_lib.core.measure.machine import synchronize
from recipes_lib.parallel._moments import Moment, moment_now, seconds_between

FORWARD = "forward"
BACKWARD = "backward"


class Action(NamedTuple):
    """One stage computes one micro-batch in one direction; `begin` and `end` are seconds."""

    rank: int
    stage: int
    direction: str  # FORWARD or BACKWARD
    micro_batch: int
    begin: float = 0.0
    end: float = 0.0

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.begin

    def at(self, begin: float, end: float) -> Action:
        """The same action from `begin` to `end`."""
        return self._replace(begin=begin, end=end)


def bubble_of(actions: Iterable[Action]) -> float:
    """The idle part of the time of all ranks, from the first begin to the last end: 0 to 1."""
    actions = list(actions)
    ranks = {action.rank for action in actions}
    busy = sum(action.seconds for action in actions)
    begin = min(action.begin for action in actions)
    end = max(action.end for action in actions)
    return 1 - busy / (len(ranks) * (end - begin))


class Clock:
    """Begin and end of each action of this rank, in seconds after the begin on rank 0."""

    def __init__(self, device: torch.device, group: Any, rank: int) -> None:
        """Start the clock of a pipeline, which shows the same on all ranks."""
        self._device = device
        self._rank = rank
        self._begun: list[tuple[Action, Moment]] = []
        self._ends: list[Moment] = []
        distributed.barrier(group=group)
        synchronize()
        self._zero = moment_now(self._device)
        today = time.time()
        of_rank_0 = torch.tensor(today, dtype=torch.float64, device=device)
        distributed.broadcast(of_rank_0, group=group, group_src=0)
        self._later = today - of_rank_0.item()  # seconds by which this rank began later

    @contextlib.contextmanager
    def action(self, stage: int, direction: str, micro_batch: int) -> Iterator[None]:
        """What runs inside is this action."""
        action = Action(self._rank, stage, direction, micro_batch)
        self._begun.append((action, moment_now(self._device)))
        yield
        self._ends.append(moment_now(self._device))

    def prolong(self) -> None:
        """The last action that ended lasts until now."""
        if self._ends:
            self._ends[-1] = moment_now(self._device)

    def actions(self) -> list[Action]:
        """All actions in their order, with times."""
        synchronize()
        timed = []
        for (action, begin), end in zip(self._begun, self._ends, strict=True):
            timed.append(action.at(self._seconds(begin), self._seconds(end)))
        return timed

    def _seconds(self, moment: Moment) -> float:
        return seconds_between(self._zero, moment) + self._later


class TimedStage(PipelineStage):
    """PyTorch's stage, which tells the pipeline's clock what it computes."""

    def __init__(self, pipeline: Any, stage: Any, **options: Any) -> None:
        """A stage whose actions are on the clock of `pipeline`."""
        super().__init__(stage, stage.number, **options)
        self.pipeline = pipeline

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """PyTorch's forward of a micro-batch, on the clock."""
        with self._on_clock(FORWARD, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """PyTorch's backward of a micro-batch, on the clock."""
        with self._on_clock(BACKWARD, bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def _warmup_backward_result(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Stages ask each other whether all of them know their shapes, and here all do.

        Pretended ranks (`core.predict.pretended_ranks`) answer nothing, which would mean no.
        """
        return torch.ones_like(super()._warmup_backward_result(*args, **kwargs))

    def _on_clock(self, direction: str, micro_batch: int) -> contextlib.AbstractContextManager:
        if self.pipeline.clock is None:
            return contextlib.nullcontext()
        return self.pipeline.clock.action(self.stage_index, direction, micro_batch)
