"""Steps that take turns on the clock: in which order, and which of them fit into memory together.

What slows the machine for a while then slows all of them. A round goes in the other direction than
the one before.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from recipes_lib.core.measure.free_memory import free_memory_bytes, release_memory
from recipes_lib.core.measure.step_cost import timed

ROOM = 3 / 4  # of the memory that is free may be taken by models: one too many ends the run

Turn = Callable[[], dict[str, float]]  # takes a step, and gives its times by metric


def in_turns(steps: dict[str, Callable[[], Any]], *, rounds: int = 3) -> dict[str, list[float]]:
    """Seconds of every step in `rounds` rounds of turns, each in the other direction.

    Warm up before, and compare the fastest of each.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for names in there_and_back(list(steps), rounds=rounds):
        for name in names:
            took, _ = timed(steps[name])
            seconds[name].append(took)
    return seconds


def there_and_back(names: list[str], *, rounds: int) -> Iterator[list[str]]:
    """The order of turns in each round: as given, then reversed, then as given again."""
    for turn in range(rounds):
        forth = turn % 2 == 0
        yield names if forth else names[::-1]


class Waiting(NamedTuple):
    """How a turn is built again, what it keeps in memory, and what it needs when it runs."""

    build: Callable[[], Turn]
    kept: int
    peak: int


class Turns:
    """Turns by name, which wait for each other; those in `alive` have their models."""

    def __init__(self) -> None:
        self.waiting: dict[str, Waiting] = {}
        self.alive: dict[str, Turn] = {}
        self.rounds: list[dict[str, dict[str, float]]] = []  # times by name, round by round

    def wait(
        self, name: str, turn: Turn, build: Callable[[], Turn], *, kept: int, peak: int
    ) -> None:
        """Let a turn wait for the others; it stays alive as long as there is room for it."""
        self.waiting[name] = Waiting(build, kept, peak)
        self.alive[name] = turn

    def make_room(self, peak: int) -> None:
        """Let the turns that wait go, if the next one does not fit beside their models."""
        waiting = sum(self.waiting[name].kept for name in self.alive)
        if waiting + peak > self.room():
            self.alive.clear()
        release_memory()  # a model may hang in a reference cycle

    def room(self) -> float:
        """Bytes for models: a part of the memory that is free, or taken by the models that wait."""
        return ROOM * (free_memory_bytes() + sum(self.waiting[name].kept for name in self.alive))

    def that_fit_together(self, first: str, names: Sequence[str]) -> list[list[str]]:
        """Parts of these that fit into memory, with the first one in each if that fits, too."""
        room = self.room()
        start = [first] if first in self.waiting else []
        parts = [start]
        for name in names:
            if name == first:
                continue
            if self._all_fit([*parts[-1], name], room):
                parts[-1] = [*parts[-1], name]
            elif self._all_fit([*start, name], room):
                parts.append([*start, name])
            else:
                parts.insert(0, [name])
        return [part for part in parts if part]

    def _all_fit(self, names: Sequence[str], room: float) -> bool:
        """Whether each of these can take its turn while the others wait."""
        kept = sum(self.waiting[name].kept for name in names)
        needs = [self.waiting[name] for name in names]
        return all(kept - need.kept + need.peak <= room for need in needs)

    def take(self, names: Sequence[str], rounds: int) -> Iterator[dict[str, dict[str, float]]]:
        """Let these take their turns, there and back: their times, after each round."""
        self.alive = {name: turn for name, turn in self.alive.items() if name in names}
        release_memory()
        left = list(names)
        for order in there_and_back(list(names), rounds=rounds):
            took = {}
            for name in order:
                times = self.times_of(name) if name in left else None
                if times is not None:
                    took[name] = times
            left = [name for name in left if name in took]
            self.rounds.append(took)
            yield took
        self.alive.clear()
        release_memory()

    def times_of(self, name: str) -> dict[str, float] | None:
        """The times of a turn; None for one that fails, which then takes no more turns."""
        try:
            if name not in self.alive:
                self.alive[name] = self.waiting[name].build()
            return self.alive[name]()
        except Exception as error:
            self.alive.pop(name, None)
            reason = textwrap.shorten(f"{type(error).__name__}: {error}", 60, placeholder=" …")
            print(f"  {name} takes no more turns: {reason}", flush=True)
            return None
