"""Memory over time: the live bytes of a training step, stacked by kind, one panel per step.

timeline_chart(ladder.timelines, predicted={…}, title="…")      one below the other
timeline_chart(ladder.timelines, columns=3, title="…")          every row of a ladder at once
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from recipes_lib.core.measure.timeline import KINDS, Timeline
from recipes_lib.report.figure import (
    POINTS,
    WHITE_EDGE,
    WIDTH,
    Chart,
    mark_in_key,
    new_figure,
    text_width,
)
from recipes_lib.report.style import INK, KIND_COLORS, MARK, Unit

HEADROOM = 1.22  # above the highest peak there is room for its number
WORDS = 8.5


def timeline_chart(
    timelines: Mapping[str, Timeline],
    *,
    title: str,
    predicted: Mapping[str, Timeline] | None = None,
    columns: int = 1,
) -> Chart:
    """Draw the live bytes of one step per panel, on one scale.

    From left to right are the operators, each as wide as any other, however long it takes. Every
    second phase is shaded. The peak is a dot with its number; in one column it also says what it
    consists of.

    Args:
        timelines: by the name of the step, see `core.measure.timeline.record_timeline`.
        title: the message.
        predicted: timelines by the same names: a dashed line over those that were measured.
        columns: panels beside each other.
    """
    predicted = predicted or {}
    unit = Unit(max(each.peak for each in timelines.values()))
    rows = math.ceil(len(timelines) / columns)  # the last one is perhaps not full
    marks = []
    if predicted:
        marks.append(mark_in_key("predicted before the run", "--"))
    figure, panels = new_figure(
        title,
        height=(2.3 if columns == 1 else 1.6) * rows + 0.6,
        key={kind: KIND_COLORS[kind] for kind in KINDS},
        marks=marks,
        nrows=rows,
        ncols=columns,
        squeeze=False,
        sharey=True,  # with scales of their own, all peaks would look alike
    )
    for axes in panels.flat[len(timelines) :]:
        axes.set_axis_off()  # a place without a step
    for (name, each), axes in zip(timelines.items(), panels.flat):
        _draw_step(axes, each, unit)
        axes.set_title(name, fontsize=WORDS + 1)
        if name in predicted:
            _draw_prediction(axes, predicted[name], each, unit)
        _name_phases(axes, each, 0.85 * WIDTH * POINTS / columns)
        if columns == 1:
            _write_composition(axes, each, unit)
    highest = max(each.peak for each in [*predicted.values(), *timelines.values()])
    panels[0, 0].set_ylim(0, HEADROOM * unit.of(highest))
    panels[0, 0].locator_params(axis="y", nbins=4)
    panels[0, 0].set_ylabel(f"live bytes, {unit.name}", fontsize=WORDS)
    return figure


def _draw_step(axes: Any, each: Timeline, unit: Unit) -> None:
    operators = [point.operator for point in each.points]
    # What stays for the whole step is at the bottom, what comes and goes is above it.
    layers = []
    for kind in KINDS:
        layers.append([unit.of(point.bytes[kind]) for point in each.points])
    colors = [KIND_COLORS[kind] for kind in KINDS]
    # Between two points nothing changes: the bytes go up and down in steps.
    axes.stackplot(operators, layers, colors=colors, step="post", linewidth=0)
    # A peak may last a single operator, which is less than a dot wide: the outline shows it.
    totals = [unit.of(point.total) for point in each.points]
    axes.plot(operators, totals, color=INK, linewidth=0.6, drawstyle="steps-post")
    peak = each.highest
    place = (peak.operator, unit.of(peak.total))
    axes.plot(*place, "o", color=MARK, markersize=4, zorder=5, path_effects=WHITE_EDGE)
    in_right_half = 2 * peak.operator > operators[0] + operators[-1]
    axes.annotate(
        unit.text(peak.total),
        place,
        (-5 if in_right_half else 5, 4),
        textcoords="offset points",
        ha="right" if in_right_half else "left",
        fontsize=WORDS,
        fontweight="bold",
    )
    axes.set_xlim(operators[0], operators[-1])
    # The number of an operator tells a reader nothing: the names of the phases stand there.
    axes.tick_params(axis="x", bottom=False, labelbottom=False)
    axes.tick_params(axis="y", labelsize=WORDS)


def _draw_prediction(axes: Any, predicted: Timeline, measured: Timeline, unit: Unit) -> None:
    """The bytes of a step without data, phase by phase as wide as the measured ones."""
    operators = []
    for (_, *before), (_, *now) in zip(predicted.phases(), measured.phases()):
        begin, end = before
        stretched = (now[1] - now[0]) / max(end - begin, 1)
        for point in predicted.points:
            if begin <= point.operator < end:
                operators.append(now[0] + (point.operator - begin) * stretched)
    totals = [unit.of(point.total) for point in predicted.points[: len(operators)]]
    look = {"color": MARK, "linestyle": "--", "linewidth": 1, "path_effects": WHITE_EDGE}
    axes.plot(operators, totals, drawstyle="steps-post", **look)


def _name_phases(axes: Any, each: Timeline, room: float) -> None:
    """Shade every second phase, and name those that are wide enough."""
    width = each.points[-1].operator - each.points[0].operator
    for number, (phase, begin, end) in enumerate(each.phases()):
        if number % 2:
            axes.axvspan(begin, end, color=INK, alpha=0.15, linewidth=0, zorder=0)
        if text_width(phase, WORDS) < (end - begin) / max(width, 1) * room:
            below = ((begin + end) / 2, -0.09)
            place = axes.get_xaxis_transform()
            axes.text(*below, phase, transform=place, ha="center", va="center", fontsize=WORDS)


def _write_composition(axes: Any, each: Timeline, unit: Unit) -> None:
    """What the peak consists of, to the right of the panel, the topmost layer first."""
    lines = [f"{kind} {unit.text(size)}" for kind, size in reversed(each.at_peak().items()) if size]
    text = "\n".join(["at the peak", *lines])
    axes.text(1.02, 0.95, text, transform=axes.transAxes, va="top", fontsize=WORDS, linespacing=1.5)
