"""Steps that take turns on the clock: which of them fit into memory at once, and how each is built.

    build() -> model, optimizer, step        step(model, optimizer) -> loss

To time all rows of a ladder in turns, their models have to be alive together. Where memory is too
small for all, they are put into groups. Each group has the baseline, with which it is compared.
A ladder of speeds has no plans: it makes its groups itself, by the bytes of the weights.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from recipes_lib.core.measure import there_and_back, timed
from recipes_lib.core.measure.machine import free_memory_bytes
from recipes_lib.core.predict.budget import Budget
from recipes_lib.report.ladder_text import WIDTH

Build = Callable[[], tuple[Any, Any, Callable[[Any, Any], float]]]

# A step may be skipped, as those of fp16 are while the loss scale is too large. An optimizer that
# keeps no states at all (plain SGD) takes this many steps to warm up.
MOST_WARM_UP_STEPS = 20


class ReadyStep:
    """A model, its optimizer and a step that has warmed up. Call it to take the next step.

    Warm means that the optimizer has its states: AdamW makes them in the first step.
    """

    def __init__(self, build: Build) -> None:
        self.model, self.optimizer, self._step = build()
        self()
        taken = 1
        while not self.optimizer.state and taken < MOST_WARM_UP_STEPS:
            self()
            taken += 1

    def __call__(self) -> float:
        """Take a step and return its loss."""
        return self._step(self.model, self.optimizer)


def groups_that_fit(plans: dict[str, Budget], *, limit_bytes: float) -> list[list[str]]:
    """The rows in groups whose models fit into `limit_bytes` together, by their plans.

    The first row is the baseline, and the first of every group. A row that does not fit beside it
    is a group of its own.
    """
    baseline, *others = plans
    groups = [[baseline]]
    alone = []
    for name in others:
        group = _first_with_room(groups, name, plans, limit_bytes)
        if group is not None:
            group.append(name)
        elif _fit([baseline, name], plans, limit_bytes):
            groups.append([baseline, name])
        else:
            alone.append([name])
    return groups + alone


def _first_with_room(
    groups: list[list[str]], name: str, plans: dict[str, Budget], limit_bytes: float
) -> list[str] | None:
    for group in groups:
        if _fit([*group, name], plans, limit_bytes):
            return group
    return None


def _fit(names: list[str], plans: dict[str, Budget], limit_bytes: float) -> bool:
    """Whether each of these can take its step while the others wait."""
    kept = {name: kept_bytes(plans[name]) for name in names}
    waiting = sum(kept.values())
    return all(plans[name].peak + waiting - kept[name] <= limit_bytes for name in names)


def kept_bytes(plan: Budget) -> int:
    """What a model keeps between its steps. Most steps free the gradients; not all do."""
    return plan.weights + plan.states + plan.gradients


def room_for_models(*, waiting_bytes: float) -> float:
    """Bytes for models: half of the memory that is free, or taken by the models that wait.

    Half, to be careful: to build a model again costs time, and one model too many ends the run.
    """
    return (free_memory_bytes() + waiting_bytes) / 2


def rows_that_wait(rows: Sequence[Any], builds: Collection[str]) -> list[Any]:
    """The rows that can be built again and had no turn yet. Raises ValueError if there are none."""
    waiting = [row for row in rows if row.name in builds and row.turns == 0]
    if not waiting:
        raise ValueError("no row can take turns: add rows with climb, which knows their builds")
    return waiting


def warmed_up(builds: dict[str, Build], ready: dict[str, ReadyStep]) -> dict[str, ReadyStep]:
    """The steps that take turns: those of `ready` as they are, the others built now.

    A step that cannot be built is missing, and a line says why.
    """
    steps = {}
    for name, build in builds.items():
        step = ready.get(name)
        if step is None:
            step = _ready(name, build)
        if step is not None:
            steps[name] = step
    return steps


def take_turns(steps: dict[str, ReadyStep], *, rounds: int) -> Iterator[dict[str, float]]:
    """Yield the seconds of each round by name; each round goes in the other direction.

    A step that fails is taken out of `steps`, and a line says why. Raises ValueError for less than
    one round.
    """
    for names in there_and_back(list(steps), rounds=rounds):
        took = {}
        for name in names:
            if name in steps:
                seconds = _seconds_of(name, steps[name])
                if seconds is None:
                    del steps[name]
                else:
                    took[name] = seconds
        yield took


def announce(names: Sequence[str], *, heading: str = "in turns") -> None:
    """Print which rows take turns now, in one line."""
    line = f"{heading}: {', '.join(names)}"
    print(textwrap.shorten(line, WIDTH, placeholder=" …"), flush=True)


def ratio_and_range(ratios: Sequence[float]) -> dict[str, float | None]:
    """What a row keeps of its ratios to the first row, one per round: the median and the range.

    None where the first row had no turn: then there is nothing to compare with.
    """
    if not ratios:
        return {"ratio": None, "ratio_low": None, "ratio_high": None}
    return {
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
    }


def _ready(name: str, build: Build) -> ReadyStep | None:
    try:
        return ReadyStep(build)
    except Exception as error:
        _say_why(name, error)
        return None


def _seconds_of(name: str, step: ReadyStep) -> float | None:
    try:
        seconds, _ = timed(step)
    except Exception as error:
        _say_why(name, error)
        return None
    return seconds


def _say_why(name: str, error: Exception) -> None:
    reason = textwrap.shorten(f"{type(error).__name__}: {error}", 60, placeholder=" …")
    print(f"  {name} takes no more turns: {reason}", flush=True)
