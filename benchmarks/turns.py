"""Programs that answer one image each, timed in turns on one thread.

The machine may be slower in one turn than in another. Every turn times every program, so a ratio of
two of them compares what was measured side by side.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

Program = Callable[[Tensor], Any]

LEAST_FORWARDS = 5  # of one turn, however long they take


def in_turns(
    programs: dict[str, Program], image: Tensor, *, turns: int, seconds: float
) -> dict[str, list[float]]:
    """By the name of the program: milliseconds of one forward in each turn.

    Args:
        programs: each is called with `image` alone.
        seconds: how long one program runs in one turn.
    """
    found: dict[str, list[float]] = {name: [] for name in programs}
    for program in programs.values():  # the first call allocates
        program(image)
    for _ in range(turns):
        for name, program in programs.items():
            found[name].append(one_turn(program, image, seconds))
    return found


def one_turn(program: Program, image: Tensor, seconds: float) -> float:
    """Milliseconds of one forward: the median of those that `seconds` has room for.

    The clock counts what this thread computes, so other programs disturb it little.
    """
    forwards = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(forwards) < LEAST_FORWARDS:
        start = time.thread_time()
        program(image)
        forwards.append(1e3 * (time.thread_time() - start))
    return statistics.median(forwards)
