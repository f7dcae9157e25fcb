"""The grid of a pipeline: which rank computed what from when to when, and what of it is idle.

    time ->          0   1   2   3   4   5   6   7   8   9  10  11
    rank 0, stage 0  F0  F1   .   .  B0  B0  F2  B1  B1   .  B2  B2
    rank 1, stage 1   .  F0  B0  B0  F1  B1  B1  F2  B2  B2   .   .

Each cell is an `Action`. The bubble is the idle part of the time of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

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
    return 1 - busy / (len(ranks) * span(actions))


def span(actions: Iterable[Action]) -> float:
    """Seconds from the first begin to the last end."""
    actions = list(actions)
    begin = min(action.begin for action in actions)
    end = max(action.end for action in actions)
    return end - begin
