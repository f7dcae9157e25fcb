"""Bytes against tokens: how fast the memory of a step grows with the length of a sequence."""

from __future__ import annotations

import math
from typing import Any

from recipes_lib.core.measure.machine import GIB
from recipes_lib.report.curves import draw_curves, name_ends
from recipes_lib.report.figure import WIDTH, blank_figure, ink, muted, page

# What `workflows.longest.search` does on either device.
STEPS = "each point is one step under the memory account: a real one on a GPU, a dry one on a CPU"


@page()
def growth_chart(
    curves: dict[str, dict[int, int | None]],
    *,
    fixed_bytes: int,
    limit_bytes: int,
    title: str | None = None,
    source: str = STEPS,
) -> Any:
    """Draw the peak against the tokens, both logarithmic.

    Each curve ends with its slope. With a slope of 2, twice the tokens take four times the memory
    beyond the fixed part.

    Args:
        curves: {tokens: bytes} by name, with None for a length that ran out of memory; the first
            is what the others are compared with.
        fixed_bytes: there at any length: weights and states.
        limit_bytes: what the device has.
        title: the message.
        source: where the numbers are from.
    Raises ValueError if there are no curves.
    """
    figure, axes = blank_figure(
        curves,
        (WIDTH, 4),
        title=title or f"How memory grows with the text: what fits into {_gib(limit_bytes)}",
        source=source,
    )
    points = {}
    for name, curve in curves.items():
        points[name] = [(tokens, curve[tokens] / GIB) for tokens in sorted(_known(curve))]
    axes.set(xscale="log", yscale="log", xlabel="tokens in the sequence", ylabel="peak, GiB")
    draw_curves(axes, points, marker="o", markersize=3.5)
    axes.set_ylim(bottom=fixed_bytes / GIB / 2)  # room for the name of the fixed part
    _draw_level(axes, limit_bytes, f"the limit: {_gib(limit_bytes)}", ink(), up=3)
    _draw_level(axes, fixed_bytes, f"weights and states: {_gib(fixed_bytes)}", muted(), up=-11)
    _ticks_at_powers_of_two(axes, points)
    _draw_guides(axes)
    ends = {name: f"{name}: slope {slope(curves[name], fixed_bytes):.2f}" for name in points}
    name_ends(axes, points, ends)
    return figure


def slope(curve: dict[int, int | None], fixed_bytes: int = 0) -> float:
    """Exponent of the growth between the two longest known lengths of a curve {tokens: bytes}.

    `fixed_bytes` are there at any length, and do not grow.
    """
    sizes = _known(curve)
    before_last, last = sorted(sizes)[-2:]
    growth = (sizes[last] - fixed_bytes) / (sizes[before_last] - fixed_bytes)
    return math.log(growth) / math.log(last / before_last)


def _known(curve: dict[int, int | None]) -> dict[int, int]:
    return {tokens: size for tokens, size in curve.items() if size is not None}


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def _draw_level(axes: Any, size: int, text: str, color: str, *, up: float) -> None:
    """A dashed line at a size, with its name at the left end, `up` points above it."""
    axes.axhline(size / GIB, color=color, linestyle="--", linewidth=1, zorder=1)
    axes.annotate(
        text,
        (0.01, size / GIB),
        (0, up),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        color=color,
        fontsize=9,
    )


def _ticks_at_powers_of_two(axes: Any, points: dict[str, list[tuple[int, float]]]) -> None:
    tokens = [x for curve in points.values() for x, _ in curve]
    first = math.floor(math.log2(min(tokens)))
    last = math.ceil(math.log2(max(tokens)))
    step = 2 if last - first > 8 else 1
    ticks = [2**power for power in range(first, last + 1, step)]
    axes.set_xticks(ticks, [_short(tick) for tick in ticks])
    axes.minorticks_off()
    sizes = [y for curve in points.values() for _, y in curve]
    powers = range(math.floor(math.log2(min(sizes))), math.ceil(math.log2(max(sizes))) + 1)
    # Every second power, so that the numbers have room.
    powers = [power for power in powers if power % 2 == 0]
    axes.set_yticks([2.0**power for power in powers], [f"{2.0**power:g}" for power in powers])


def _short(tokens: int) -> str:
    """512, 8K: as lengths of contexts are usually written."""
    if tokens < 1024:
        return str(tokens)
    return f"{tokens // 1024:,}K"


def _draw_guides(axes: Any) -> None:
    """Two short lines in a corner that show how steep S and S² are."""
    low_x, high_x = axes.get_xlim()
    low_y, high_y = axes.get_ylim()
    # From one place at the left, as long as a tenth of the axis.
    x = low_x * (high_x / low_x) ** 0.06
    y = low_y * (high_y / low_y) ** 0.55
    reach = min((high_x / low_x) ** 0.1, (high_y / low_y) ** 0.15)
    for exponent, name in ((1, "S: slope 1"), (2, "S²: slope 2")):
        top = (x * reach, y * reach**exponent)
        axes.plot([x, top[0]], [y, top[1]], color=muted(), linewidth=1)
        axes.annotate(
            name, top, (3, 0), textcoords="offset points", va="center", color=muted(), fontsize=9
        )
