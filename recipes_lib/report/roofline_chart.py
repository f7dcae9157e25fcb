"""The roofline: what memory and arithmetic allow, and how near each phase comes.

    points = [Work("decode, fp32", operations=0.27e9, bytes_read=0.54e9, seconds=0.03)]
    roofline_chart(points, bandwidth=41e9, rate={"fp32": 1.1e11, "bf16": 4e11})

    operations per second <= min(rate, bandwidth * operations per byte)

A phase that does few operations with each byte waits for memory: it is below the slope. One that
does many waits for arithmetic: it is below the flat line. Writing one token reads each weight and
does two operations with it. Reading a prompt does as many with each weight and each of its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipes_lib.core.checks import check_number
from recipes_lib.report.curves import line_color
from recipes_lib.report.figure import WIDTH, Key, blank_figure, ink, muted, page
from recipes_lib.report.point_labels import name_points

MARGIN = 2.2  # the axes go on for this factor beyond the points
BESIDE = 4.0  # the slope's name needs room to the left of the first point


@dataclass(frozen=True)
class Work:
    """What was measured of one phase: its operations, the bytes that it reads, its seconds.

    `group` names points of one colour, for instance "decode" and "prefill". Raises ValueError for
    numbers that are not positive.
    """

    name: str
    operations: float
    bytes_read: float
    seconds: float
    group: str = ""

    def __post_init__(self) -> None:
        numbers = {"operations": self.operations, "bytes_read": self.bytes_read}
        check_number(**numbers, seconds=self.seconds, above=0)

    @property
    def intensity(self) -> float:
        """Operations per byte that is read."""
        return self.operations / self.bytes_read

    @property
    def rate(self) -> float:
        """Operations per second."""
        return self.operations / self.seconds

    def limit(self, *, bandwidth: float, rate: float) -> float:
        """Operations per second that a machine allows at this intensity."""
        return min(rate, bandwidth * self.intensity)


@page()
def roofline_chart(
    points: Sequence[Work],
    *,
    bandwidth: float,
    rate: float | Mapping[Any, float],
    title: str | None = None,
    source: str | None = None,
) -> Any:
    """Draw operations per second against operations per byte, both logarithmic, with the ceilings.

    Args:
        points: what was measured.
        bandwidth: bytes that the machine reads per second.
        rate: operations that it does per second; one number, or one per dtype, as
            `core.matrix_rate.measure_matrix_rates` returns them.
        title: the message.
        source: where the numbers are from; by default this machine and today.
    Raises ValueError if there are no points, and for ceilings that are not positive.
    """
    rates = _by_name(rate)
    check_number(bandwidth=bandwidth, above=0)
    figure, axes = blank_figure(
        points,
        (WIDTH, 4.2),
        title=title or "What memory and arithmetic allow, and what was reached",
        source=source,
        key=[Key(group, color) for group, color in _colors(points).items() if group],
    )
    axes.set(xscale="log", yscale="log")
    axes.set(xlabel="operations per byte that is read", ylabel="operations per second")
    _set_limits(axes, points, bandwidth, rates)
    axes.yaxis.set_major_formatter(_short)
    axes.xaxis.set_major_formatter(_plain)
    lines = _draw_ceilings(axes, bandwidth, rates)
    colors = [_colors(points)[point.group] for point in points]
    for point, color in zip(points, colors, strict=True):
        axes.plot([point.intensity], [point.rate], "o", color=color, markersize=6.5, zorder=3)
    name_points(
        axes,
        [(point.intensity, point.rate) for point in points],
        [point.name for point in points],
        colors=colors,
        lines=lines,
    )
    return figure


def _by_name(rate: float | Mapping[Any, float]) -> dict[str, float]:
    """The rates by name: "float32" for torch.float32, nothing for the only one."""
    rates = {"": rate}
    if isinstance(rate, Mapping):
        rates = {str(dtype).removeprefix("torch."): each for dtype, each in rate.items()}
    for each in rates.values():
        check_number(rate=each, above=0)
    return rates


def _set_limits(
    axes: Any, points: Sequence[Work], bandwidth: float, rates: Mapping[str, float]
) -> None:
    """From the points to where the slope has reached the highest ceiling."""
    intensities = [point.intensity for point in points]
    highest = max(rates.values())
    corner = highest / bandwidth  # above it, arithmetic is the limit
    axes.set_xlim(min(intensities) / BESIDE, MARGIN * max(*intensities, 2 * corner))
    lowest = min(point.rate for point in points)
    top = max(highest, *(point.rate for point in points))
    axes.set_ylim(lowest / MARGIN, top * MARGIN)


def _draw_ceilings(
    axes: Any, bandwidth: float, rates: Mapping[str, float]
) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """The slope of the memory and the flat lines of the arithmetic. Returns their ends."""
    left, right = axes.get_xlim()
    bottom, _ = axes.get_ylim()
    highest = max(rates.values())
    begin = max(left, bottom / bandwidth)
    lines = [((begin, bandwidth * begin), (highest / bandwidth, highest))]
    for rate in rates.values():
        lines.append(((rate / bandwidth, rate), (right, rate)))
    for (x0, y0), (x1, y1) in lines:
        axes.plot([x0, x1], [y0, y1], color=ink(), linewidth=1.4, zorder=1)
    for name, rate in rates.items():
        _write_behind(axes, f"arithmetic, {name}\n{_short(rate)} per second", rate)
    _name_slope(axes, bandwidth, begin, highest / bandwidth)
    return lines


def _name_slope(axes: Any, bandwidth: float, begin: float, end: float) -> None:
    """The name of the slope along it, at its lower end."""
    x = begin * (end / begin) ** 0.06
    text = axes.annotate(
        f"memory: {bandwidth / 1e9:,.0f} GB/s",
        (x, bandwidth * x),
        (-3, 4),
        textcoords="offset points",
        color=muted(),
        fontsize=9,
        rotation=_angle(axes, bandwidth),
        rotation_mode="anchor",
    )
    text.set_in_layout(False)


def _angle(axes: Any, bandwidth: float) -> float:
    """How steep the slope is on paper, in degrees."""
    axes.figure.draw_without_rendering()
    left, _ = axes.get_xlim()
    x0, y0 = axes.transData.transform((left, bandwidth * left))
    x1, y1 = axes.transData.transform((10 * left, bandwidth * 10 * left))
    return math.degrees(math.atan2(y1 - y0, x1 - x0))


def _write_behind(axes: Any, text: str, height: float) -> None:
    """The name of a flat line, at its right end outside of the axes."""
    axes.annotate(
        text.replace(", \n", "\n"),  # the only rate has no name
        (1, height),
        (6, 0),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        va="center",
        color=muted(),
        fontsize=9,
        annotation_clip=False,
    )


def _colors(points: Sequence[Work]) -> dict[str, str]:
    """A colour per group. The first of all colours is that of baselines, and there is none."""
    groups = dict.fromkeys(point.group for point in points)
    return {group: line_color(number) for number, group in enumerate(groups, 1)}


def _short(value: float, _position: int | None = None) -> str:
    """Operations per second in words: "40 G", "1.2 T"."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.3g} {letter}"
    return f"{value:.3g}"


def _plain(value: float, _position: int | None = None) -> str:
    return f"{value:g}"
