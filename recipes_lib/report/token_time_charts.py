"""What the time of one token depends on: the bytes of the weights, and the position in the text.

overhead_chart       time per token against bytes, with a line of two terms for each kernel
position_time_chart  time per token against the position: flat with a cache, rising without

A step reads all weights once, so its time is a line: a fixed part, which no smaller weight takes
away, and bytes over bandwidth. The fixed part is where the line meets the axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recipes_lib.report.curves import draw_curves, line_color, name_ends
from recipes_lib.report.figure import WIDTH, Key, blank_figure, page
from recipes_lib.report.overhead_fit import OverheadFit
from recipes_lib.report.style import MILLISECONDS

MEGABYTES = 1e6  # decimal, as bandwidths are given

# --- bytes ----------------------------------------------------------------------------------------


@page()
def overhead_chart(
    points: Mapping[str, Sequence[tuple[float, float]]],
    fits: Mapping[str, OverheadFit],
    *,
    title: str | None = None,
    source: str | None = None,
) -> Any:
    """Draw time per token against bytes of weights: each line begins at the overhead.

    Args:
        points: (bytes, seconds) by the name of the loop or kernel.
        fits: what `core.overhead_fit.fit_overhead` found for each of them.
        title: the message.
        source: where the numbers are from; by default this machine and today.
    Raises ValueError if there are no points, or if a name has no fit.
    """
    missing = [name for name in points if name not in fits]
    if missing:
        raise ValueError(f"no fit for {missing}: give one with fit_overhead for each of the points")
    figure, axes = blank_figure(
        points,
        (WIDTH, 3.6),
        title=title or "A fixed part, and the time to read the weights",
        source=source,
        key=[
            Key(_in_terms(name, fits[name]), line_color(number))
            for number, name in enumerate(points)
        ],
    )
    largest = max(size for each in points.values() for size, _ in each)
    right = 1.05 * largest  # air behind the last point
    lines = {name: _line_of(fits[name], right) for name in points}
    draw_curves(axes, lines)
    for number, each in enumerate(points.values()):
        sizes = [size / MEGABYTES for size, _ in each]
        times = [seconds * MILLISECONDS for _, seconds in each]
        axes.plot(sizes, times, "o", color=line_color(number), markersize=5)
    axes.set(xlabel="weights read for a token, MB", ylabel="time per token, ms")
    axes.set(xlim=(0, right / MEGABYTES))
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter("{x:,g}")
    name_ends(axes, lines)
    return figure


def _line_of(fit: OverheadFit, right: float) -> list[tuple[float, float]]:
    """From no bytes at all to `right` bytes: where the line begins is the overhead itself."""
    ends = [(size, fit.seconds(size)) for size in (0.0, right)]
    return [(size / MEGABYTES, seconds * MILLISECONDS) for size, seconds in ends]


def _in_terms(name: str, fit: OverheadFit) -> str:
    """ "decode loop: 2.1 ms + bytes / 24 GB/s" """
    return f"{name}: {fit.overhead * MILLISECONDS:.1f} ms + bytes / {fit.bandwidth / 1e9:.0f} GB/s"


# --- position -------------------------------------------------------------------------------------


@page()
def position_time_chart(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str | None = None,
    source: str | None = None,
) -> Any:
    """Draw the time of a token against its position: flat with a cache, rising without one.

    Args:
        curves: (position, seconds) by name; the first is what the others are compared with.
        title: the message.
        source: where the numbers are from; by default this machine and today.
    Raises ValueError if there are no points.
    """
    in_milliseconds = {}
    for name, curve in curves.items():
        in_milliseconds[name] = [(place, seconds * MILLISECONDS) for place, seconds in curve]
    figure, axes = blank_figure(
        [point for curve in curves.values() for point in curve],
        (WIDTH, 3.4),
        title=title or "The time of a token at each position of a text",
        source=source,
    )
    draw_curves(axes, in_milliseconds)
    axes.set(xlabel="position in the text, tokens", ylabel="time per token, ms")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)  # on a cut axis a nearly flat line would look steep
    axes.xaxis.set_major_formatter("{x:,g}")
    name_ends(axes, in_milliseconds)
    return figure
