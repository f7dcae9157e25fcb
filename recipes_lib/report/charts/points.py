"""Points: each a variant with two numbers and its name, and the ones that are worth having.

points({"fp32": (4.0, 8.0), "int8": (1.0, 8.1)}, title=…, xlabel="bytes", ylabel="perplexity")
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recipes_lib.report.charts.figure import Chart, name_at_right, new_figure, set_up
from recipes_lib.report.style import INK, RECIPE, REFERENCE

Place = tuple[float, float]


def points(
    places: Mapping[str, Place],
    *,
    title: str,
    height: float = 3.9,
    front: bool = False,
    **settings: Any,
) -> Chart:
    """Draw one point per name; the first is what the others are compared with.

    Args:
        title: the message.
        front: join the points than which no other is both smaller and better, and draw a line at
            the height of the first. Both axes then grow with what is bad.
        settings: of `Axes.set`: xlabel, ylabel, xscale, ylim and so on.
    """
    figure, axes = new_figure(title, height=height)
    names = []
    for number, (name, place) in enumerate(places.items()):
        color = RECIPE if number else INK
        axes.plot(*place, "o", color=color, markersize=7, zorder=3)
        names.append((name, place, color))
    if front:
        first = next(iter(places.values()))
        axes.axhline(first[1], color=REFERENCE, linestyle="--", linewidth=1, zorder=1)
        axes.plot(*zip(*worth_having(places.values())), color=REFERENCE, linewidth=1.6, zorder=1)
    set_up(axes, **settings)
    name_at_right(axes, names)
    return figure


def worth_having(places: Any) -> list[Place]:
    """The points than which no other is both smaller and better, the smallest first."""
    front: list[Place] = []
    for place in sorted(places):
        if not front or place[1] < front[-1][1]:
            front.append(place)
    return front
