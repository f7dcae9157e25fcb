"""Spans: who does what from when to when, in lanes below each other.

spans({"GPipe": [Span("rank 0", "forward", 0.0, 0.1, "1"), …]}, title="…")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from recipes_lib.report.charts.figure import (
    POINTS,
    WIDTH,
    Chart,
    new_figure,
    readable_on,
    text_width,
)
from recipes_lib.report.style import INK, MILLISECONDS, WORK

WORDS = 8  # the size of a text inside a span


class Span(NamedTuple):
    """What happened from `begin` to `end`, in seconds. `kind` has a colour; `text` stands in it."""

    lane: str
    kind: str
    begin: float
    end: float
    text: str = ""


def spans(
    panels: Mapping[str, Sequence[Span]],
    *,
    title: str,
) -> Chart:
    """Draw one panel per step on one scale of time, with a lane for each who works. Pale is idle.

    Args:
        panels: the spans of a step, by its name.
        title: the message.
    """
    every = [span for step in panels.values() for span in step]
    kinds = {span.kind for span in every}
    lanes = {name: _lanes_of_step(step) for name, step in panels.items()}
    heights = [len(each) for each in lanes.values()]
    figure, axes = new_figure(
        title,
        height=0.3 * sum(heights) + 0.4 * len(heights) + 1.0,
        key={kind: color for kind, color in WORK.items() if kind in kinds},
        nrows=len(panels),
        sharex=True,
        squeeze=False,
        height_ratios=heights,
    )
    longest = max(_seconds_of_step(step) for step in panels.values())
    for panel, (name, step) in zip(axes[:, 0], panels.items(), strict=True):
        _draw_spans_of_step(panel, step, lanes[name], longest)
        panel.set_title(f"{name}: {MILLISECONDS * _seconds_of_step(step):,.3g} ms")
    axes[-1, 0].set(xlabel="milliseconds", xlim=(0, MILLISECONDS * longest))
    return figure


def _lanes_of_step(step: Sequence[Span]) -> list[str]:
    return list(dict.fromkeys(span.lane for span in step))


def _seconds_of_step(step: Sequence[Span]) -> float:
    return max(span.end for span in step) - min(span.begin for span in step)


def _draw_spans_of_step(axes: Any, step: Sequence[Span], lanes: list[str], longest: float) -> None:
    """A bar for each span in its lane, with its text where it has room."""
    started = min(span.begin for span in step)
    axes.barh(lanes, MILLISECONDS * _seconds_of_step(step), height=0.84, color=INK, alpha=0.2)
    points_per_second = 0.85 * WIDTH * POINTS / longest
    for span in step:
        begin = MILLISECONDS * (span.begin - started)
        width = MILLISECONDS * (span.end - span.begin)
        color = WORK[span.kind]
        axes.barh(span.lane, width, left=begin, height=0.84, color=color)
        room = points_per_second * (span.end - span.begin)
        if text_width(span.text, WORDS) + 3 < room:
            look = {"fontsize": WORDS, "color": readable_on(color)}
            axes.text(begin + width / 2, span.lane, span.text, ha="center", va="center", **look)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
