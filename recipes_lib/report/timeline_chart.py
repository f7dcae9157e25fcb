"""Memory over time: the live bytes of a training step, stacked by kind, one panel per step.

timeline_chart(timelines, predicted=…)               large panels: the peak says what it consists of
timeline_chart(timelines, predicted=…, columns=3)    small multiples: every row of a ladder at once
"""

from __future__ import annotations

from typing import Any

from recipes_lib.core.timeline import KINDS, Timeline
from recipes_lib.report.figure import WIDTH, Key, blank_figure, faint, ink, muted, page
from recipes_lib.report.labels import POINTS, text_width
from recipes_lib.report.style import KIND_COLORS, Unit, measured_here

SMALL = 8  # the size of a label inside a small panel
LARGE = 9
HEADROOM = 1.2  # above the highest peak there is room for its number


@page()
def timeline_chart(
    timelines: dict[str, Timeline],
    *,
    predicted: dict[str, int] | None = None,
    columns: int = 1,
    title: str | None = None,
    source: str | None = None,
) -> Any:
    """Draw the live bytes of one step per panel, on one scale.

    The phases are shaded and named, the peak is a dot with its number, `predicted` (bytes by the
    same names) is a dashed line. In one column, each panel also says what its peak consists of.

    Args:
        timelines: by the name of the step, see `core.timeline.record_timeline`.
        columns: more than one makes small multiples.
        title: the message; by default none, because each panel has its name.
        source: where the numbers are from; by default this machine and today.
    Raises ValueError if there are no timelines, or for a number of columns below 1.
    """
    if columns < 1:
        raise ValueError(f"columns={columns}: give 1 for large panels, or more for small ones")
    large = columns == 1
    lines = -(-len(timelines) // columns)  # as many as needed, the last one perhaps not full
    predicted = predicted or {}
    key = []
    if not large:
        key = [Key(kind, KIND_COLORS[kind]) for kind in _kinds_of(timelines)]
    if predicted:
        key.append(Key("predicted before the run", ink(), "dashes"))
    figure, panels = blank_figure(
        timelines,
        (WIDTH, lines * (2.5 if large else 1.55)),
        title=title,
        source=measured_here() if source is None else source,
        key=key,
        nrows=lines,
        ncols=columns,
        squeeze=False,
    )
    unit = Unit(max(timeline.peak for timeline in timelines.values()))
    for name, axes in zip(timelines, panels.flat, strict=False):
        _draw_step(axes, timelines[name], unit, predicted.get(name))
        axes.set_title(name, fontsize=LARGE + 1 if large else SMALL, fontweight="bold")
    for axes in panels.flat[len(timelines) :]:
        axes.set_axis_off()  # a place without a step
    _share_one_scale(panels, timelines, predicted, unit)
    _write_words(panels, timelines, unit, large=large)
    return figure


def _kinds_of(timelines: dict[str, Timeline]) -> list[str]:
    """The kinds that are alive at any time, in the order in which they are stacked."""
    kinds = []
    for kind in KINDS:
        if any(point.bytes[kind] for line in timelines.values() for point in line.points):
            kinds.append(kind)
    return kinds


def _draw_step(axes: Any, timeline: Timeline, unit: Unit, predicted: int | None) -> None:
    operators = [point.operator for point in timeline.points]
    # What stays for the whole step is at the bottom, what comes and goes is above it.
    layers = [_sizes_of(timeline, kind, unit) for kind in KINDS]
    colors = [KIND_COLORS[kind] for kind in KINDS]
    # Between two points nothing changes: the bytes go up and down in steps.
    axes.stackplot(operators, layers, colors=colors, labels=KINDS, step="post", linewidth=0)
    # A peak may last a single operator, which is less than a dot wide: the outline shows it.
    totals = [unit.of(point.total) for point in timeline.points]
    axes.plot(operators, totals, color=muted(), linewidth=0.6, drawstyle="steps-post")
    for number, (_, first, last) in enumerate(timeline.phases()):
        if number % 2 == 1:
            axes.axvspan(first, last, color=faint(), alpha=0.25, linewidth=0, zorder=0)
    if predicted:
        axes.axhline(unit.of(predicted), color=ink(), linestyle="--", linewidth=1)
    peak = timeline.highest
    axes.plot([peak.operator], [unit.of(peak.total)], "o", color=ink(), markersize=4, zorder=5)
    axes.set_xlim(operators[0], operators[-1])
    axes.tick_params(axis="x", bottom=False, labelbottom=False)


def _sizes_of(timeline: Timeline, kind: str, unit: Unit) -> list[float]:
    return [unit.of(point.bytes[kind]) for point in timeline.points]


def _share_one_scale(
    panels: Any, timelines: dict[str, Timeline], predicted: dict[str, int], unit: Unit
) -> None:
    highest = max(timeline.peak for timeline in timelines.values())
    top = unit.of(max([highest, *predicted.values()]))
    for axes in panels.flat:
        axes.set_ylim(0, HEADROOM * top)
        axes.tick_params(axis="y", labelsize=SMALL)
        axes.locator_params(axis="y", nbins=4)
        axes.yaxis.set_major_formatter("{x:,g}")
    for line in panels:
        for axes in line[1:]:  # the first of a line has the numbers for all
            axes.tick_params(axis="y", labelleft=False)
    panels[0, 0].set_ylabel(f"live bytes, {unit.name}", fontsize=SMALL)


# --- words, where they fit ------------------------------------------------------------------------


def _write_words(panels: Any, timelines: dict[str, Timeline], unit: Unit, *, large: bool) -> None:
    for name, axes in zip(timelines, panels.flat, strict=False):
        if large:
            _write_composition(axes, timelines[name], unit)
    panels[0, 0].figure.draw_without_rendering()  # only then are the panels as wide as they will be
    for name, axes in zip(timelines, panels.flat, strict=False):
        _write_phases(axes, timelines[name], LARGE if large else SMALL)
        _write_peak(axes, timelines[name], unit, LARGE if large else SMALL)


def _write_phases(axes: Any, timeline: Timeline, size: float) -> None:
    width = axes.get_window_extent().width / axes.figure.dpi * POINTS
    operators = timeline.points[-1].operator - timeline.points[0].operator
    for phase, first, last in timeline.phases():
        room = (last - first) / max(operators, 1) * width
        if text_width(phase, size=size) + 2 > room:
            continue  # a narrower phase is only shaded
        place = ((first + last) / 2, 0)
        axes.annotate(
            phase,
            place,
            (0, -3),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=size,
            color=muted(),
        )


def _write_peak(axes: Any, timeline: Timeline, unit: Unit, size: float) -> None:
    """The number of the peak, above its dot and on the side that has more room."""
    peak = timeline.highest
    first = timeline.points[0].operator
    last = timeline.points[-1].operator
    in_right_half = peak.operator - first > (last - first) / 2
    axes.annotate(
        unit.text(peak.total),
        (peak.operator, unit.of(peak.total)),
        (-4 if in_right_half else 4, 3),
        textcoords="offset points",
        ha="right" if in_right_half else "left",
        va="bottom",
        fontsize=size,
        fontweight="bold",
    )


def _write_composition(axes: Any, timeline: Timeline, unit: Unit) -> None:
    """What the peak consists of, to the right of the panel, in the order of the layers."""
    kinds = list(reversed(_kinds_of({"": timeline})))
    place = {"xycoords": "axes fraction", "textcoords": "offset points", "annotation_clip": False}
    line = 1.5 * LARGE
    axes.annotate("at the peak", (1, 0.9), (22, 0), va="center", fontsize=LARGE, **place)
    for number, kind in enumerate(kinds, start=1):
        size = unit.text(timeline.at_peak()[kind])
        down = -line * number
        color = KIND_COLORS[kind]
        axes.annotate("■", (1, 0.9), (8, down), va="center", color=color, fontsize=12, **place)
        text = f"{kind} {size}"
        axes.annotate(text, (1, 0.9), (22, down), va="center", fontsize=LARGE, **place)
