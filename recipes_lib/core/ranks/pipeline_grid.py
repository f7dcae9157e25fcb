"""The grid of a pipeline: which rank computes what from when to when, and what of it is idle.

    time ->          0   1   2   3   4   5   6   7   8   9  10  11
    rank 0, stage 0  F0  F1   .   .  B0  B0  F2  B1  B1   .  B2  B2
    rank 1, stage 1   .  F0  B0  B0  F1  B1  B1  F2  B2  B2   .   .

Each cell is an `Action`. A rank works through its list of actions in their order. An action begins
when the rank is free and when the action that it needs has ended:

    forward of stage s    needs the forward of stage s - 1 on the same micro-batch
    backward of stage s   needs the backward of stage s + 1; that of the last stage its own forward

So a list of actions for each rank and the seconds of a forward and of a backward make the whole
grid (`place`). A measured grid has the same form. In both, the bubble is the idle part of the time
of all ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
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


def place(orders: list[list[Action]], *, seconds: Callable[[Action], float]) -> list[Action]:
    """The actions of all ranks with their times, if each begins as early as it can.

    Args:
        orders: the actions of each rank, in the order in which the rank works through them.
        seconds: how long an action takes. Sending takes no time here.
    Raises ValueError if the actions wait for each other for ever, or if one needs a result that no
    action of the lists makes.
    """
    last_stage = max((action.stage for order in orders for action in order), default=0)
    waiting = [list(order) for order in orders]
    free_at = [0.0] * len(orders)
    end_of: dict[tuple[int, str, int], float] = {}
    placed = []
    while any(waiting):
        moved = False
        for rank, order in enumerate(waiting):
            while order:
                needed = _needed(order[0], last_stage)
                if needed is not None and needed not in end_of:
                    break  # another rank has to come first
                action = order.pop(0)
                begin = max(free_at[rank], end_of.get(needed, 0.0))
                end = begin + seconds(action)
                free_at[rank] = end
                end_of[action.stage, action.direction, action.micro_batch] = end
                placed.append(action.at(begin, end))
                moved = True
        if not moved:
            first = next(order[0] for order in waiting if order)
            raise ValueError(
                f"the {first.direction} of micro-batch {first.micro_batch} in stage {first.stage} "
                f"waits for ever: give orders in which each action comes after what it needs"
            )
    return placed


def _needed(action: Action, last_stage: int) -> tuple[int, str, int] | None:
    """The action that has to end before this one can begin; None for the very first forward."""
    if action.direction == FORWARD:
        if action.stage == 0:
            return None
        return action.stage - 1, FORWARD, action.micro_batch
    if action.stage == last_stage:
        return action.stage, FORWARD, action.micro_batch
    return action.stage + 1, BACKWARD, action.micro_batch


def bubble_of(actions: Iterable[Action]) -> float:
    """The idle part of the time of all ranks, from the first begin to the last end: 0 to 1.

    Raises ValueError if there is no action with a time.
    """
    actions = list(actions)
    if not actions or span(actions) == 0:
        raise ValueError("no action has a time: give placed or measured actions")
    ranks = {action.rank for action in actions}
    busy = sum(action.seconds for action in actions)
    return 1 - busy / (len(ranks) * span(actions))


def median_seconds(actions: Iterable[Action]) -> Callable[[Action], float]:
    """How long an action takes by measured ones: the median of its stage and direction.

    For `place`: the grid of a schedule with measured times, and without what was only waiting.
    Raises ValueError, when it is called, for a stage that was not measured.
    """
    found: dict[tuple[int, str], list[float]] = {}
    for action in actions:
        found.setdefault((action.stage, action.direction), []).append(action.seconds)

    def seconds(action: Action) -> float:
        measured = found.get((action.stage, action.direction))
        if measured is None:
            raise ValueError(
                f"no {action.direction} of stage {action.stage} was measured: measure a step with "
                f"as many stages"
            )
        return statistics.median(measured)

    return seconds


def span(actions: Iterable[Action]) -> float:
    """Seconds from the first begin to the last end."""
    actions = list(actions)
    begin = min(action.begin for action in actions)
    end = max(action.end for action in actions)
    return end - begin


def most_in_flight(order: Iterable[Action]) -> int:
    """How many forwards of one rank wait for their backward at most: what its memory holds."""
    waiting = 0
    most = 0
    for action in order:
        if action.direction == FORWARD:
            waiting += 1
        else:
            waiting -= 1
        most = max(most, waiting)
    return most
