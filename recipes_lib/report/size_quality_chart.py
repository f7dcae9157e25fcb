"""Size against quality: what each format of the weights costs, and which ones are worth it.

    points = [Variant("fp32", 4.0, 7.99), Variant("int8", 1.01, 8.04), Variant("int4", 0.63, 8.26)]
    size_quality_chart(points)

Nothing that lies to the right of a point and above it is worth having: the point is smaller and
better. A thin line joins the points that are left.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from recipes_lib.core.checks import check_number
from recipes_lib.report.curves import line_color
from recipes_lib.report.figure import WIDTH, blank_figure, faint, muted, page
from recipes_lib.report.point_labels import name_points
from recipes_lib.report.style import REFERENCE

WIDE = 3.0  # perplexities further apart than this factor are drawn on a logarithmic axis


@dataclass(frozen=True)
class Variant:
    """A model in one format: bytes per weight, scales included, and the perplexity that it has.

    `group` names points of one colour, for instance "int8" and "int4". Raises ValueError for
    numbers that are not positive, and for a perplexity that is no number.
    """

    name: str
    bytes_per_weight: float
    perplexity: float
    group: str = ""

    def __post_init__(self) -> None:
        check_number(bytes_per_weight=self.bytes_per_weight, perplexity=self.perplexity, above=0)


@page()
def size_quality_chart(
    points: Sequence[Variant], *, title: str | None = None, source: str | None = None
) -> Any:
    """Draw the perplexity against the bytes per weight, with a name beside each point.

    Args:
        points: the first is what the others are compared with: a line goes through its perplexity.
        title: the message.
        source: where the numbers are from; by default this machine and today.
    Raises ValueError if there are no points.
    """
    figure, axes = blank_figure(
        points,
        (WIDTH, 3.9),
        title=title or "What smaller weights cost",
        source=source,
    )
    axes.set(xlabel="bytes per weight, with scales", ylabel="perplexity (lower is better)")
    _set_scales(axes, points)
    first = points[0].perplexity
    axes.axhline(first, color=REFERENCE, linestyle="--", linewidth=1, zorder=1)
    front = worth_having(points)
    axes.plot(
        [point.bytes_per_weight for point in front],
        [point.perplexity for point in front],
        color=faint(),
        linewidth=1.6,
        zorder=1,
    )
    colors = _draw_points(axes, points)
    places = [(point.bytes_per_weight, point.perplexity) for point in points]
    name_points(
        axes,
        places,
        [f"{point.name}  {point.perplexity:.2f}" for point in points],
        colors=colors,
        lines=[*_lines(front), *_level(axes, first)],
    )
    return figure


def worth_having(points: Sequence[Variant]) -> list[Variant]:
    """The points than which no other is both smaller and better, the smallest first."""
    front: list[Variant] = []
    for point in sorted(points, key=_smaller_then_better):
        if not front or point.perplexity < front[-1].perplexity:
            front.append(point)
    return front


def _smaller_then_better(point: Variant) -> tuple[float, float]:
    return point.bytes_per_weight, point.perplexity


def _set_scales(axes: Any, points: Sequence[Variant]) -> None:
    sizes = [point.bytes_per_weight for point in points]
    perplexities = [point.perplexity for point in points]
    # From half a byte to four: on a linear axis the small ones, which matter, would be one heap.
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(sizes) / 1.5, max(sizes) * 1.35)
    axes.xaxis.set_major_formatter(_plain)
    axes.minorticks_off()
    low = min(perplexities)
    high = max(perplexities)
    if high > WIDE * low:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.2, high * 1.3)
        axes.yaxis.set_major_formatter(_plain)
        return
    room = max(0.16 * (high - low), 0.01 * low)
    axes.set_ylim(low - room, high + room)


def _draw_points(axes: Any, points: Sequence[Variant]) -> list[str]:
    groups = list(dict.fromkeys(point.group for point in points))
    colors = []
    for point in points:
        color = line_color(groups.index(point.group) + 1)  # the first colour is the baseline's
        if point is points[0]:
            color = muted()
        axes.plot(
            [point.bytes_per_weight],
            [point.perplexity],
            "o",
            color=color,
            markersize=7,
            zorder=3,
        )
        colors.append(color)
    return colors


def _lines(front: Sequence[Variant]) -> list[Any]:
    """The line of those that are worth having, as the ends of its parts."""
    places = [(point.bytes_per_weight, point.perplexity) for point in front]
    return list(itertools.pairwise(places))


def _level(axes: Any, height: float) -> list[Any]:
    """The ends of the line at the first perplexity."""
    left, right = axes.get_xlim()
    return [((left, height), (right, height))]


def _plain(value: float, _position: int | None = None) -> str:
    return f"{value:g}"
