"""What charts of size against quality have in common: their scales, and the points worth having.

set_scales(axes, places)                 # places: (size, what is wrong), both small where good
front = worth_having(points, place)      # the points than which no other is smaller and better
draw_front(axes, places_of_front)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from matplotlib.ticker import LogFormatter

from recipes_lib.report.figure import faint

WIDE = 3.0  # qualities further apart than this factor are drawn on a logarithmic axis

Point = TypeVar("Point")
Place = tuple[float, float]


def worth_having(points: Sequence[Point], place: Callable[[Point], Place]) -> list[Point]:
    """The points than which no other is both smaller and better, the smallest first.

    `place` gives the size of a point and what is wrong with it: less is better of both.
    """
    front: list[Point] = []
    for point in sorted(points, key=place):
        if not front or place(point)[1] < place(front[-1])[1]:
            front.append(point)
    return front


def set_scales(axes: Any, places: Sequence[Place]) -> None:
    """Sizes by factors of two; qualities too where they are far apart."""
    sizes, errors = zip(*places)
    # On a linear axis the small ones, which matter, would be one heap.
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(sizes) / 1.5, max(sizes) * 1.35)
    axes.xaxis.set_major_formatter(_plain)
    axes.minorticks_off()
    low = min(errors)
    high = max(errors)
    if low > 0 and high > WIDE * low:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.2, high * 1.3)
        axes.yaxis.set_major_formatter(_plain)
        # A range of less than ten has no other numbers beside it: "3", not "3 × 10⁰".
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.5)))
        return
    room = max(0.16 * (high - low), 0.01 * low)
    axes.set_ylim(low - room, high + room)


def draw_front(
    axes: Any, places: Sequence[Place], *, color: str | None = None
) -> list[tuple[Place, Place]]:
    """A thin line through the places that are worth having, faint by default; returns its parts."""
    if color is None:
        color = faint()
    axes.plot(*zip(*places), color=color, linewidth=1.6, zorder=1)
    return list(itertools.pairwise(places))


def _plain(value: float, _position: int | None = None) -> str:
    return f"{value:g}"
