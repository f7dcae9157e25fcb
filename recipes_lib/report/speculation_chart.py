"""What speculation gains: the speed-up against the part of the drafted tokens that was accepted.

points = [Speculated("code", acceptance=0.8, speedup=2.0, line="3 tokens")]
speculation_chart(points, formula={"3 tokens": partial(predicted_speedup, draft_tokens=3, …)})
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from recipes_lib.core.checks import check_number
from recipes_lib.report.curves import draw_curves, line_color, name_ends
from recipes_lib.report.figure import WIDTH, blank_figure, muted, page
from recipes_lib.report.point_labels import name_points
from recipes_lib.report.style import RECIPE

# The line of what neither gains nor loses. Below it speculation is slower than no speculation.
NO_GAIN = ((0.0, 1.0), (1.0, 1.0))


class Speculated(NamedTuple):
    """One text that was written with speculation: the part of the drafted tokens that was accepted,
    and how many times as fast it was as writing token by token. `line` names its formula's line.
    """

    name: str
    acceptance: float
    speedup: float
    line: str = ""


@page()
def speculation_chart(
    points: Sequence[Speculated],
    *,
    formula: Mapping[str, Callable[[float], float]],
    title: str | None = None,
    source: str | None = None,
) -> Any:
    """Draw the measured speed-up against the acceptance, beside what the formula expects.

    Args:
        points: one per text.
        formula: the speed-up that is expected at an acceptance, by the name of the line; for
            instance `partial(predicted_speedup, draft_tokens=3, cost_ratio=0.0)`.
        title: the message.
        source: where the numbers are from; by default this machine and today.
    Raises ValueError if there are no points, for an acceptance outside of 0 to 1, and for a point
    on a line that has no formula.
    """
    for point in points:
        _check_point(point, formula)
    figure, axes = blank_figure(
        points,
        (WIDTH, 3.9),
        title=title or "What speculation gains, measured and by its formula",
        source=source,
    )
    lines = {name: _drawn_formula(expected) for name, expected in formula.items()}
    names = list(lines)
    draw_curves(axes, lines)
    axes.plot(*zip(*NO_GAIN, strict=True), color=muted(), linewidth=1, zorder=1)
    colors = [_color_of(point, names) for point in points]
    for point, color in zip(points, colors, strict=True):
        axes.plot([point.acceptance], [point.speedup], "o", color=color, markersize=6.5, zorder=3)
    axes.set(xlabel="accepted part of the drafted tokens", ylabel="times as fast as token by token")
    axes.set(xlim=(0, 1))
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter("{x:.0%}")
    name_ends(axes, lines)
    name_points(
        axes,
        [(point.acceptance, point.speedup) for point in points],
        [point.name for point in points],
        colors=colors,
        # Pieces of all lines, on which no name is to lie.
        lines=[pair for line in [*lines.values(), NO_GAIN] for pair in itertools.pairwise(line)],
    )
    return figure


def _check_point(point: Speculated, lines: Collection[str]) -> None:
    check_number(acceptance=point.acceptance, least=0)
    if point.acceptance > 1:
        raise ValueError(
            f"{point.name}: acceptance={point.acceptance}: give the accepted part of the "
            f"drafted tokens, from 0 to 1"
        )
    if point.line and point.line not in lines:
        raise ValueError(f"{point.name}: line={point.line!r}: give one of {[*lines]}")


def _color_of(point: Speculated, lines: Sequence[str]) -> str:
    """A point has the colour of its formula's line: the distance of the two is what is shown."""
    if point.line:
        return line_color(lines.index(point.line))
    return RECIPE


def _drawn_formula(expected: Callable[[float], float]) -> list[tuple[float, float]]:
    """A line of short pieces. It ends just before 1, where a formula may divide by zero."""
    acceptances = [number / 50 for number in range(50)] + [0.9999]
    return [(acceptance, expected(acceptance)) for acceptance in acceptances]
