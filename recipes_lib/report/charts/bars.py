"""Bars: a row per name, and beside each other one column of bars per quantity.

bars(
    ["baseline", "LoRA"],
    Bars("MiB", [900, 300], ["900", "300"], marks=[905, 290]),
    Bars("seconds", [1.0, 1.1], ["1.0", "1.1"]),
    title="A third of the bytes, as much time",
)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from recipes_lib.report.charts.figure import (
    POINTS,
    WHITE_EDGE,
    WIDTH,
    Chart,
    mark_in_key,
    new_figure,
    readable_on,
    text_width,
)
from recipes_lib.report.style import INK, MARK, RECIPE, three_digits

BAR = 0.66  # the height of a bar; the next one begins at 1
LABEL = 9.5  # the size of a label beside a bar
INSIDE = 8  # the size of a label inside a part


class Bars(NamedTuple):
    """One column: a heading, and what is drawn in the line of each row.

    `values` are the lengths; or, by name, the lengths of parts that are stacked. `labels` stand at
    the ends; a column of labels alone has no values. `marks` are ticks where arithmetic expects the
    ends, `ranges` whiskers, `limits` pale bars behind. `width` is relative to the other columns.
    """

    heading: str
    values: Sequence[float] | Mapping[str, Sequence[float]] = ()
    labels: Sequence[str] = ()
    marks: Sequence[float | None] = ()
    ranges: Sequence[tuple[float | None, float | None]] = ()
    limits: Sequence[float] = ()
    colors: Sequence[str] | Mapping[str, str] = ()
    width: float = 1.0


def bars(
    names: Sequence[str],
    *columns: Bars,
    title: str,
    groups: Sequence[str] = (),
    source: str | None = None,
) -> Chart:
    """Draw the columns of bars beside each other.

    Args:
        names: of the rows.
        title: the message.
        groups: of each row; a group's name stands above its first row.
        source: where the numbers are from; by default this machine and today.
    """
    places, headings = _places_of_rows(groups or [""] * len(names))
    end = max(places) + 1
    widths = [column.width for column in columns]
    key = {}
    marks = {}
    for column in columns:
        if isinstance(column.values, Mapping):
            key |= {part: column.colors[part] for part in column.values}
        if any(column.marks):
            look = {"marker": "|", "markersize": 11}
            marks["ticks"] = mark_in_key("predicted before the run", "none", **look)
        if any(high for _, high in column.ranges):
            marks["range"] = mark_in_key("range of the turns", "-")
    figure, axes = new_figure(
        title,
        height=0.3 * end + 0.9,
        source=source,
        key=key,
        marks=list(marks.values()),
        ncols=len(columns),
        width_ratios=widths,
        sharey=True,
        squeeze=False,
    )
    names_inches = (max(text_width(name) for name in names) + 12) / POINTS
    for column, panel in zip(columns, axes[0], strict=True):
        inches = (WIDTH - names_inches - 0.3) * column.width / sum(widths) - 0.2
        _draw_column(panel, column, places, inches * POINTS)
    first = axes[0, 0]
    first.set_yticks([*places, *headings.values()], [*names, *headings])
    first.set_ylim(end - 0.4, -0.6)  # the first row is on top
    first.tick_params(axis="y", pad=names_inches * POINTS)
    labels = first.get_yticklabels()
    for label in labels:
        label.set(ha="left", va="center")
    for heading in labels[len(names) :]:
        heading.set(weight="bold")
    return figure


def _places_of_rows(groups: Sequence[str]) -> tuple[list[float], dict[str, float]]:
    """Where each row of bars stands, and the heading of each group."""
    places: list[float] = []
    headings: dict[str, float] = {}
    place = 0.0
    for number, group in enumerate(groups):
        if group and (number == 0 or group != groups[number - 1]):
            if places:
                place += 0.35  # air above a heading
            headings[group] = place
            place += 1
        places.append(place)
        place += 1
    return places, headings


def _draw_column(axes: Any, column: Bars, places: Sequence[float], room: float) -> None:
    """One column of bars, `room` points wide."""
    axes.set_title(column.heading, fontsize=LABEL)
    # The numbers stand beside the bars, so nobody needs a scale.
    axes.tick_params(bottom=False, labelbottom=False, left=False)
    axes.spines[["bottom", "left"]].set_visible(False)
    if column.limits:
        axes.barh(places, column.limits, height=BAR, color=INK, alpha=0.25)
    ends = [0.0] * len(places)
    layers = {}
    if isinstance(column.values, Mapping):
        for part, lengths in column.values.items():
            look = {"height": BAR, "color": column.colors[part]}
            layers[part] = axes.barh(places, lengths, left=ends, **look)
            ends = [left + length for left, length in zip(ends, lengths, strict=True)]
    elif column.values:
        axes.barh(places, column.values, height=BAR, color=column.colors or RECIPE)
        ends = list(column.values)
    _draw_marks(axes, column, places)
    for further in (column.marks, [high for _, high in column.ranges], column.limits):
        if further:
            ends = [max(end, other or 0) for end, other in zip(ends, further, strict=True)]
    right = _end_of_axis(ends, column.labels, room)
    axes.set_xlim(0, right)
    # An unseen bar that ends behind everything carries the label.
    unseen = axes.barh(places, ends, alpha=0)
    axes.bar_label(unseen, column.labels or [""] * len(ends), padding=5, fontsize=LABEL)
    for part, layer in layers.items():
        _label_parts(axes, layer, column.colors[part], room / right)


def _draw_marks(axes: Any, column: Bars, places: Sequence[float]) -> None:
    """On bars: ticks where arithmetic expects the ends, and whiskers over the turns."""
    look = {"color": MARK, "path_effects": WHITE_EDGE}
    for place, mark in zip(places, column.marks):
        if mark:
            reach = BAR / 2 + 0.08
            axes.plot([mark, mark], [place - reach, place + reach], linewidth=2, **look)
    for place, (low, high) in zip(places, column.ranges):
        if high is not None:
            axes.plot([low, high], [place, place], linewidth=1.5, **look)


def _end_of_axis(ends: Sequence[float], labels: Sequence[str], room: float) -> float:
    """Where the axis of bars has to end, so that the longest label ends with it."""
    limit = max(ends) or 1.0
    for end, label in zip(ends, labels):
        beside = text_width(label, LABEL) + 10
        limit = max(limit, end / max(1 - beside / room, 0.1))
    return limit


def _label_number(value: float) -> str:
    if value == round(value):
        return f"{value:,.0f}"
    return three_digits(value)


def _label_parts(axes: Any, layer: Any, color: str, points_per_unit: float) -> None:
    """The number of each part inside its bar, where it has room."""
    texts = [_label_number(bar.get_width()) for bar in layer]
    fits = [
        text_width(text, INSIDE) + 4 < bar.get_width() * points_per_unit
        for text, bar in zip(texts, layer, strict=True)
    ]
    shown = [text if room else "" for text, room in zip(texts, fits, strict=True)]
    look = {"fontsize": INSIDE, "color": readable_on(color)}
    axes.bar_label(layer, shown, label_type="center", **look)
