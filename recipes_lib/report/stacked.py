"""Stacked bars: parts of one color each, numbers inside them, the sum at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from recipes_lib.report.bars import (
    BAR,
    Slots,
    draw_ticks,
    room_for_labels,
    without_scale,
    write_beside,
)
from recipes_lib.report.figure import WIDTH, Key, blank_figure, ink, muted
from recipes_lib.report.labels import POINTS, readable_on, text_width

LABEL = 9.5  # the size of a label beside a bar
INSIDE = 8  # the size of a label inside a bar


def stacked_chart(
    names: list[str],
    parts: dict[str, list[float]],
    colors: dict[str, str],
    *,
    words: Callable[[float], str],
    title: str,
    source: str | None,
    heading: str,
    limits: dict[str, float] | None = None,
    ticks: dict[str, float] | None = None,
) -> Any:
    """A stacked bar per name, with its parts and its sum as text."""
    rows = [{"name": name} for name in names]
    slots = Slots(rows)
    key = [Key(part, colors[part]) for part in parts]
    if ticks:
        key.append(Key("at the machine's own rate of matrix products", ink(), "tick"))
    figure, axes = blank_figure(
        rows, (WIDTH, slots.inches + 0.5), title=title, source=source, key=key, bars=True
    )
    slots.write_names(axes)
    layers = _stack(axes, slots.places, parts, colors)
    sums = [sum(column) for column in zip(*parts.values(), strict=True)]
    marks = [(ticks or {}).get(name, 0) for name in names]
    draw_ticks(axes, marks, slots.places)
    ends = [max(pair) for pair in zip(sums, marks, strict=True)]
    labels = [words(total) for total in sums]
    without_scale(axes, heading)
    slots.draw_zero(axes)
    room_for_labels(axes, ends, labels, LABEL)
    for end, place, label in zip(ends, slots.places, labels, strict=True):
        write_beside(axes, label, end, place, fontsize=LABEL, fontweight="bold")
    for layer, (part, values) in zip(layers, parts.items(), strict=True):
        _label_segments(axes, layer, part, [words(value) for value in values], INSIDE)
    _draw_limits(axes, limits or {})
    return figure


def _draw_limits(axes: Any, limits: dict[str, float]) -> None:
    """A dashed line per device, as far as the axis reaches, with its name below the bars."""
    below = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
    for name, limit in limits.items():
        if limit < axes.get_xlim()[1]:
            axes.axvline(limit, color=muted(), linestyle="--", linewidth=1, zorder=0)
            axes.annotate(name, (limit, 0), (0, -3), ha="center", va="top", fontsize=9, **below)


def _stack(
    axes: Any, places: Sequence[float], parts: dict[str, list[float]], colors: dict[str, str]
) -> list[Any]:
    """Stacked bars, one layer per part; gives the layers. Their first bars start at zero."""
    left = [0.0] * len(places)  # where the next part of each bar begins
    layers = []
    for name, sizes in parts.items():
        layers.append(
            axes.barh(
                places,
                sizes,
                left=left,
                height=BAR,
                color=colors[name],
                edgecolor=axes.figure.get_facecolor(),
                linewidth=0.8,
            )
        )
        left = [begin + size for begin, size in zip(left, sizes, strict=True)]
    return layers


def _label_segments(axes: Any, layer: Any, name: str, texts: Sequence[str], size: float) -> None:
    """Each bar of a layer says its number inside, and its name where that fits, too."""
    per_unit = axes.transData.transform([(0, 0), (1, 0)])
    points = (per_unit[1][0] - per_unit[0][0]) / axes.figure.dpi * POINTS
    for bar, number in zip(layer, texts, strict=True):
        room = bar.get_width() * points - 6
        text = f"{name} {number}"
        if text_width(text, size=size) > room:
            text = number
        if text_width(text, size=size) > room:
            continue  # the key says what it is, the sum at the end how much there is in all
        middle = (bar.get_x() + bar.get_width() / 2, bar.get_y() + bar.get_height() / 2)
        color = readable_on(bar.get_facecolor())
        axes.text(*middle, text, fontsize=size, color=color, ha="center", va="center")
