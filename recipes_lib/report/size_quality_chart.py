"""Size against quality: what each format of the weights costs, and which ones are worth it.

    points = [Variant("fp32", 4.0, 7.99), Variant("int8", 1.01, 8.04), Variant("int4", 0.63, 8.26)]
    size_quality_chart(points)

Nothing that lies to the right of a point and above it is worth having: the point is smaller and
better. A thin line joins the points that are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from recipes_lib.core.checks import check_number
from recipes_lib.report.curves import line_color
from recipes_lib.report.figure import WIDTH, blank_figure, muted, page
from recipes_lib.report.point_labels import name_points
from recipes_lib.report.size_axes import draw_front, set_scales, worth_having
from recipes_lib.report.style import REFERENCE


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
    places = [_place(point) for point in points]
    set_scales(axes, places)
    first = points[0].perplexity
    axes.axhline(first, color=REFERENCE, linestyle="--", linewidth=1, zorder=1)
    front = [_place(point) for point in worth_having(points, _place)]
    lines = draw_front(axes, front)
    colors = _draw_points(axes, points)
    name_points(
        axes,
        places,
        [f"{point.name}  {point.perplexity:.2f}" for point in points],
        colors=colors,
        lines=[*lines, *_level(axes, first)],
    )
    return figure


def _place(point: Variant) -> tuple[float, float]:
    return point.bytes_per_weight, point.perplexity


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


def _level(axes: Any, height: float) -> list[Any]:
    """The ends of the line at the first perplexity."""
    left, right = axes.get_xlim()
    return [((left, height), (right, height))]
