"""Memory over time: the live bytes of a training step, stacked by kind, one panel per step.

timeline_chart(timelines, predicted=…)               large panels: the peak says what it consists of
timeline_chart(timelines, predicted=…, columns=3)    small multiples: every row of a ladder at once
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from recipes_lib.core.measure.timeline import KINDS, Timeline
from recipes_lib.report.figure import WIDTH, Key, blank_figure, faint, ink, muted, page
from recipes_lib.report.labels import POINTS, text_width
from recipes_lib.report.style import KIND_COLORS, Unit


class Look(NamedTuple):
    """How high a panel is, and how large its words are."""

    inches: float
    name: float  # points of the panel's name
    words: float  # points of what stands in it and around it


LARGE = Look(inches=2.5, name=10, words=9)
SMALL = Look(inches=1.55, name=8, words=8)
SCALE = 8  # points of the numbers on the axis, in both
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

    From left to right are the operators, each as wide as any other, however long it takes. The
    phases are shaded and named, the peak is a dot with its number, `predicted` (bytes by the same
    names) is a dashed line. In one column, each panel also says what its peak consists of.

    Args:
        timelines: by the name of the step, see `core.timeline.record_timeline`.
        columns: more than one makes small multiples.
        title: the message; by default none, because each panel has its name.
        source: where the numbers are from; by default this machine and today.
    Raises ValueError if there are no timelines, or for a number of columns below 1.
    """
    if columns < 1:
        raise ValueError(f"columns={columns}: give 1 for large panels, or more for small ones")
    look = LARGE if columns == 1 else SMALL
    predicted = predicted or {}
    lines = math.ceil(len(timelines) / columns)  # the last one is perhaps not full
    figure, panels = blank_figure(
        timelines,
        (WIDTH, lines * look.inches),
        title=title,
        source=source,
        key=_key(timelines, predicted, look),
        nrows=lines,
        ncols=columns,
        squeeze=False,
    )
    unit = Unit(max(timeline.peak for timeline in timelines.values()))
    for name, axes in zip(timelines, panels.flat, strict=False):
        _draw_step(axes, timelines[name], unit)
        if predicted.get(name):
            axes.axhline(unit.of(predicted[name]), color=ink(), linestyle="--", linewidth=1)
        axes.set_title(name, fontsize=look.name, fontweight="bold")
    for axes in panels.flat[len(timelines) :]:
        axes.set_axis_off()  # a place without a step
    _share_one_scale(panels, timelines, predicted, unit)
    _write_words(panels, timelines, unit, look)
    return figure


def _key(timelines: dict[str, Timeline], predicted: dict[str, int], look: Look) -> list[Key]:
    key = []
    # A large panel has the names of its kinds beside it, with their bytes at the peak.
    if look is SMALL:
        key += [Key(kind, KIND_COLORS[kind]) for kind in _kinds_of(timelines)]
    if predicted:
        key.append(Key("predicted before the run", ink(), "dashes"))
    return key


def _kinds_of(timelines: dict[str, Timeline]) -> list[str]:
    """The kinds that are alive at any time, in the order in which they are stacked."""
    kinds = []
    for kind in KINDS:
        if any(point.bytes[kind] for line in timelines.values() for point in line.points):
            kinds.append(kind)
    return kinds


def _draw_step(axes: Any, timeline: Timeline, unit: Unit) -> None:
    operators = [point.operator for point in timeline.points]
    _stack_kinds(axes, timeline, operators, unit)
    _shade_phases(axes, timeline)
    peak = timeline.highest
    # On top of everything, the line of the prediction included.
    axes.plot([peak.operator], [unit.of(peak.total)], "o", color=ink(), markersize=4, zorder=5)
    axes.set_xlim(operators[0], operators[-1])
    # The number of an operator tells a reader nothing: the names of the phases stand there.
    axes.tick_params(axis="x", bottom=False, labelbottom=False)


def _stack_kinds(axes: Any, timeline: Timeline, operators: list[int], unit: Unit) -> None:
    # What stays for the whole step is at the bottom, what comes and goes is above it.
    layers = [_sizes_of(timeline, kind, unit) for kind in KINDS]
    colors = [KIND_COLORS[kind] for kind in KINDS]
    # Between two points nothing changes: the bytes go up and down in steps.
    axes.stackplot(operators, layers, colors=colors, labels=KINDS, step="post", linewidth=0)
    # A peak may last a single operator, which is less than a dot wide: the outline shows it.
    totals = [unit.of(point.total) for point in timeline.points]
    axes.plot(operators, totals, color=muted(), linewidth=0.6, drawstyle="steps-post")


def _sizes_of(timeline: Timeline, kind: str, unit: Unit) -> list[float]:
    return [unit.of(point.bytes[kind]) for point in timeline.points]


def _shade_phases(axes: Any, timeline: Timeline) -> None:
    """Every second phase: a shade beside none needs no line between them."""
    for _, first, last in timeline.phases()[1::2]:
        axes.axvspan(first, last, color=faint(), alpha=0.25, linewidth=0, zorder=0)


def _share_one_scale(
    panels: Any, timelines: dict[str, Timeline], predicted: dict[str, int], unit: Unit
) -> None:
    """One scale for all panels: with scales of their own, all peaks would look alike."""
    highest = max(timeline.peak for timeline in timelines.values())
    top = unit.of(max([highest, *predicted.values()]))
    for axes in panels.flat:
        axes.set_ylim(0, HEADROOM * top)
        axes.tick_params(axis="y", labelsize=SCALE)
        axes.locator_params(axis="y", nbins=4)
        axes.yaxis.set_major_formatter("{x:,g}")
    for line in panels:
        for axes in line[1:]:  # the first of a line has the numbers for all
            axes.tick_params(axis="y", labelleft=False)
    panels[0, 0].set_ylabel(f"live bytes, {unit.name}", fontsize=SCALE)


# --- words, where they fit ------------------------------------------------------------------------


def _write_words(panels: Any, timelines: dict[str, Timeline], unit: Unit, look: Look) -> None:
    if look is LARGE:
        # Before the next step: what stands beside the panels makes them narrower.
        for name, axes in zip(timelines, panels.flat, strict=False):
            _write_composition(axes, timelines[name], unit)
    panels[0, 0].figure.draw_without_rendering()  # only then are the panels as wide as they will be
    for name, axes in zip(timelines, panels.flat, strict=False):
        _write_phases(axes, timelines[name], look.words)
        _write_peak(axes, timelines[name], unit, look.words)


def _write_phases(axes: Any, timeline: Timeline, size: float) -> None:
    """The name of each phase below it, where the phase is wide enough for its name."""
    width = axes.get_window_extent().width / axes.figure.dpi * POINTS
    operators = timeline.points[-1].operator - timeline.points[0].operator
    for phase, first, last in timeline.phases():
        room = (last - first) / max(operators, 1) * width
        if text_width(phase, size=size) + 2 > room:
            continue  # a narrower phase is only shaded
        axes.annotate(
            phase,
            ((first + last) / 2, 0),
            # All on one line. With their upper edges aligned, "step" would stand higher.
            (0, -size - 2),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            va="baseline",
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
    place = {
        "xycoords": "axes fraction",
        "textcoords": "offset points",
        "annotation_clip": False,  # it stands outside of the axes
        "va": "center",
    }
    corner = (1, 0.9)  # of the axes; from there in points: squares first, then the words
    axes.annotate("at the peak", corner, (22, 0), fontsize=LARGE.words, **place)
    sizes = timeline.at_peak()
    # The topmost layer comes first, as in the picture.
    kinds = reversed(_kinds_of({"": timeline}))
    for number, kind in enumerate(kinds, start=1):
        down = -1.5 * LARGE.words * number
        axes.annotate("■", corner, (8, down), color=KIND_COLORS[kind], fontsize=12, **place)
        text = f"{kind} {unit.text(sizes[kind])}"
        axes.annotate(text, corner, (22, down), fontsize=LARGE.words, **place)
