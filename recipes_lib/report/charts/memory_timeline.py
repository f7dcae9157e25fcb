"""Memory over time: the live bytes of a training step, stacked by kind, one panel per step.

timeline_chart(ladder.timelines, predicted={…}, title="…")
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from recipes_lib.core.measure.timeline import KINDS, Point, Timeline
from recipes_lib.report.charts.figure import (
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
OUTLINED = 4_000  # points
SMALL = 2**20 / 20  # bytes: what is less would be printed as 0.0 MiB


def timeline_chart(
    timelines: Mapping[str, Timeline],
    *,
    title: str,
    predicted: Mapping[str, Timeline] | None = None,
    both_towers: bool = False,
    width: float = WIDTH,
    source: str | None = None,
) -> Chart:
    """Draw the live bytes of one step per panel, on one scale.

    From left to right are the operators, each as wide as the bytes that it takes or frees, however
    long it takes: so a short moment that is high is wide, too. Every second phase is shaded. The
    peak is a dot with its number, and beside the panel stands what it consists of.

    Args:
        timelines: by the name of the step, see `core.measure.timeline.record_timeline`.
        title: the message.
        predicted: timelines by the same names: a dashed line over those that were measured.
        both_towers: mark the end of backward like the peak.
        width: inches; NARROW for phones.
        source: where the numbers are from; by default this machine and today.
    """
    predicted = predicted or {}
    unit = Unit(max(each.peak for each in timelines.values()))
    marks = []
    if predicted:
        marks.append(mark_in_key("predicted before the run", "--"))
    figure, panels = new_figure(
        title,
        height=2.3 * len(timelines) + 0.6,
        width=width,
        key={kind: KIND_COLORS[kind] for kind in KINDS},
        marks=marks,
        source=source,
        nrows=len(timelines),
        squeeze=False,
        sharey=True,  # with scales of their own, all peaks would look alike
    )
    for (name, each), axes in zip(timelines.items(), panels.flat, strict=True):
        marked = {"at the peak": each.highest}
        if both_towers:
            marked["at the end of backward"] = each.towers()[1]
        _draw_bytes_of_step(axes, each, unit, marked.values())
        axes.set_title(name, fontsize=WORDS + 1)
        if name in predicted:
            _draw_prediction(axes, predicted[name], each, unit)
        _name_phases(axes, each)
        _write_compositions(axes, marked, unit)
    highest = max(each.peak for each in [*predicted.values(), *timelines.values()])
    panels[0, 0].set_ylim(0, HEADROOM * unit.of(highest))
    panels[0, 0].locator_params(axis="y", nbins=4)
    panels[0, 0].set_ylabel(f"live bytes, {unit.name}", fontsize=WORDS)
    return figure


def _places_of_points(each: Timeline) -> list[int]:
    """How far to the right each point of a timeline is: the bytes that have come and gone."""
    places = [0]
    for before, point in zip(each.points, each.points[1:]):
        places.append(places[-1] + abs(point.total - before.total))
    return places


def _spans_of_phases(each: Timeline) -> list[tuple[str, int, int]]:
    """The phases of a timeline with the places at which they begin and end.

    One begins at the last point of the phase before: what its first operator takes is its own.
    """
    places = _places_of_points(each)
    phases = []
    begins = []
    for number, point in enumerate(each.points):
        if not phases or phases[-1] != point.phase:
            phases.append(point.phase)
            begins.append(places[max(number - 1, 0)])
    return list(zip(phases, begins, [*begins[1:], places[-1]]))


def _draw_bytes_of_step(axes: Any, each: Timeline, unit: Unit, marked: Iterable[Point]) -> None:
    """The live bytes of one step, a layer for each kind, and the points that are marked."""
    places = _places_of_points(each)
    # What stays for the whole step is at the bottom, what comes and goes is above it.
    layers = []
    for kind in KINDS:
        layers.append([unit.of(point.bytes[kind]) for point in each.points])
    axes.stackplot(places, layers, colors=[KIND_COLORS[kind] for kind in KINDS], linewidth=0)
    totals = [unit.of(point.total) for point in each.points]
    if len(totals) < OUTLINED:  # more teeth than that, and their outline covers the layers
        axes.plot(places, totals, color=INK, linewidth=0.6)
    for point in marked:
        place = (places[each.points.index(point)], unit.of(point.total))
        axes.plot(*place, "o", color=MARK, markersize=4, zorder=5, path_effects=WHITE_EDGE)
        in_right_half = 2 * place[0] > places[-1]
        axes.annotate(
            unit.text(point.total),
            place,
            (-6 if in_right_half else 6, 9),
            textcoords="offset points",
            ha="right" if in_right_half else "left",
            fontsize=WORDS,
            fontweight="bold",
        )
    axes.set_xlim(0, places[-1])
    # The number of a byte tells a reader nothing: the names of the phases stand there.
    axes.tick_params(axis="x", bottom=False, labelbottom=False)
    axes.tick_params(axis="y", labelsize=WORDS)


def _draw_prediction(axes: Any, predicted: Timeline, measured: Timeline, unit: Unit) -> None:
    """Under a timeline: the bytes of a step without data, its phases as wide as measured."""
    places = []
    totals = []
    for (_, *before), (_, *now) in zip(_spans_of_phases(predicted), _spans_of_phases(measured)):
        begin, end = before
        stretched = (now[1] - now[0]) / max(end - begin, 1)
        for place, point in zip(_places_of_points(predicted), predicted.points):
            if begin <= place <= end:
                places.append(now[0] + (place - begin) * stretched)
                totals.append(unit.of(point.total))
    look = {"color": MARK, "linestyle": "--", "linewidth": 1, "path_effects": WHITE_EDGE}
    axes.plot(places, totals, **look)


def _name_phases(axes: Any, each: Timeline) -> None:
    """Shade every second phase of a timeline, and name those that are wide enough."""
    room = 0.85 * axes.figure.get_figwidth() * POINTS
    width = max(_places_of_points(each)[-1], 1)
    for number, (phase, begin, end) in enumerate(_spans_of_phases(each)):
        if number % 2:
            axes.axvspan(begin, end, color=INK, alpha=0.15, linewidth=0, zorder=0)
        if text_width(phase, WORDS) < (end - begin) / width * room:
            below = ((begin + end) / 2, -0.09)
            place = axes.get_xaxis_transform()
            axes.text(*below, phase, transform=place, ha="center", va="center", fontsize=WORDS)


def _write_compositions(axes: Any, marked: Mapping[str, Point], unit: Unit) -> None:
    """Beside a timeline: what the marked points consist of, the topmost layer first."""
    texts = []
    for when, point in marked.items():
        kinds = reversed(point.bytes.items())
        lines = [f"{kind} {unit.text(size)}" for kind, size in kinds if size >= SMALL]
        texts.append("\n".join([when, *lines]))
    text = "\n\n".join(texts)
    axes.text(1.02, 0.95, text, transform=axes.transAxes, va="top", fontsize=WORDS, linespacing=1.3)
