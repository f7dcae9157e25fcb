"""What charts with named horizontal bars have in common: rows in groups, names, labels, whiskers.

slots = Slots(rows)                        # a place per row, a heading per group
axes.barh(slots.places, sizes, height=BAR)
slots.write_names(axes)
write_labels(axes, slots, sizes, texts, heading="bytes")
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recipes_lib.report.figure import ink, muted
from recipes_lib.report.labels import POINTS, text_width
from recipes_lib.report.style import RECIPE, REFERENCE

BAR = 0.66  # the height of a bar; the next one begins at 1
LABEL = 9.5  # the size of a label beside a bar
ROW_INCHES = 0.3  # the height of a row on paper
NAME_SIZE = 10


class Slots:
    """Where the rows of a chart are: one below the other, each group below its heading.

    A row is a dictionary with a name and perhaps a group. Rows without any group have no heading.
    `size` is that of the names, in points.
    """

    def __init__(self, rows: Sequence[dict[str, Any]], *, size: float = NAME_SIZE) -> None:
        self.size = size
        self.names = [row["name"] for row in rows]
        self.places: list[float] = []
        self.headings: dict[str, float] = {}
        self.ends: list[float] = []  # below the last row of each group
        place = 0.0
        group = None
        for row in rows:
            if row.get("group") and row["group"] != group:
                group = row["group"]
                if self.places:
                    self.ends.append(place - 0.5)
                    place += 0.35  # air above a heading
                self.headings[group] = place
                place += 1
            self.places.append(place)
            place += 1
        self.end = place
        self.ends.append(place - 0.5)

    @property
    def inches(self) -> float:
        """The height that the rows need on paper."""
        return ROW_INCHES * self.end * self.size / NAME_SIZE + 0.1

    def write_names(self, axes: Any) -> None:
        """Names and headings as the labels of the axis, all from one left edge."""
        names = [*self.names, *self.headings]
        axes.set_yticks([*self.places, *self.headings.values()], names)
        axes.set_ylim(self.end - 0.4, -0.6)
        # A heading may be longer than the names: nothing else is in its line.
        widths = [text_width(name, size=self.size) for name in self.names]
        axes.tick_params(axis="y", pad=max(widths) + 8, labelsize=self.size, labelcolor=ink())
        for label in axes.get_yticklabels():
            label.set(ha="left", va="center")
            if label.get_text() in self.headings:
                label.set_fontweight("bold")

    def draw_zero(self, axes: Any) -> None:
        """The line at which the bars of each group begin."""
        begins = [place + 0.5 for place in self.headings.values()] or [-0.5]
        axes.vlines([0] * len(begins), begins, self.ends, color=muted(), linewidth=1)


def bar_colors(count: int) -> list[str]:
    """The first row is the baseline, the others are recipes."""
    return [REFERENCE] + [RECIPE] * (count - 1)


def without_scale(axes: Any, heading: str, *, size: float = LABEL) -> None:
    """Bars whose numbers stand beside them need no scale: a heading says what they are."""
    axes.set_title(heading, fontsize=size, color=muted(), fontweight="normal")
    axes.tick_params(axis="x", bottom=False, labelbottom=False)
    axes.spines["bottom"].set_visible(False)


def write_beside(axes: Any, text: str, x: float, y: float, *, gap: float = 5, **look: Any) -> None:
    """Text to the right of (x, y), `gap` points away."""
    axes.annotate(text, (x, y), (gap, 0), textcoords="offset points", va="center", **look)


def write_labels(
    axes: Any,
    slots: Slots,
    ends: Sequence[float],
    labels: Sequence[str],
    *,
    heading: str,
    size: float = LABEL,
) -> None:
    """What replaces a scale: a heading, and a label to the right of each end."""
    without_scale(axes, heading, size=size)
    slots.draw_zero(axes)
    room_for_labels(axes, ends, labels, size)
    for end, place, label in zip(ends, slots.places, labels, strict=True):
        write_beside(axes, label, end, place, fontsize=size)


def room_for_labels(axes: Any, ends: Sequence[float], labels: Sequence[str], size: float) -> None:
    """Let the axis begin at zero, and end where the last letter of the longest label is."""
    figure = axes.figure
    longest = max(ends)
    axes.set_xlim(0, longest)
    figure.draw_without_rendering()  # only then are the axes as wide as they will be
    width = axes.get_window_extent().width / figure.dpi * POINTS
    limit = longest
    for end, label in zip(ends, labels, strict=True):
        beside = text_width(label, size=size) + 12
        # end / limit of the axes are the bar's, and the rest has to take the label.
        limit = max(limit, end / max(1 - beside / width, 0.1))
    axes.set_xlim(0, limit)


def draw_ticks(axes: Any, values: Sequence[float | None], places: Sequence[float]) -> None:
    """A tick on each bar where arithmetic expected its end. A row without prediction has none."""
    for value, place in zip(values, places, strict=True):
        if value:
            reach = BAR / 2 + 0.08
            axes.plot([value, value], [place - reach, place + reach], color=ink(), linewidth=2.2)


def draw_whisker(axes: Any, low: float, middle: float, high: float, place: float) -> None:
    """From the lowest to the highest of several turns, with `middle` between them."""
    reach = [[middle - low], [high - middle]]  # two lengths: a spread need not be symmetric
    axes.errorbar(
        [middle], [place], xerr=reach, fmt="none", ecolor=ink(), elinewidth=1.1, capsize=2.5
    )
