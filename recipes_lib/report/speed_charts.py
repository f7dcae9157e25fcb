"""Charts of a model that writes text. Each takes plain numbers and returns the figure.

speed_chart         tokens per second of a ladder's rows, each inside the limit of its bytes
overhead_chart      time per token against the bytes of the weights, with the line of two terms
position_time_chart time per token against the position: flat with a cache, rising without
speculation_chart   speed-up against acceptance, with the line of the formula
throughput_chart    tokens per second of all texts against the wait of one, over batch sizes

The roofline and the chart of size against quality have files of their own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from recipes_lib.core.checks import check_number
from recipes_lib.core.overhead_fit import OverheadFit
from recipes_lib.report.bars import (
    BAR,
    Slots,
    draw_whisker,
    room_for_labels,
    without_scale,
    write_beside,
)
from recipes_lib.report.curves import draw_curves, line_color, name_ends
from recipes_lib.report.figure import WIDTH, Key, blank_figure, faint, ink, muted, page
from recipes_lib.report.point_labels import name_points
from recipes_lib.report.style import RECIPE, REFERENCE, measured_here

LABEL = 9.5  # the size of a label beside a bar
MILLISECONDS = 1000.0

# --- the ladder of speeds -------------------------------------------------------------------------


@page()
def speed_chart(
    rows: Sequence[dict[str, Any]], *, title: str | None = None, source: str | None = None
) -> Any:
    """Draw tokens per second, each bar inside the speed that the bandwidth allows its bytes.

    Args:
        rows: as `SpeedLadder` keeps them: name, tokens_per_second, share_of_limit, and where known
            group, ratio, tokens_per_second_low, tokens_per_second_high and perplexity.
        title: the message; by default from the first row to the fastest one of its group.
        source: where the numbers are from; by default this machine and today.
    Raises ValueError if there are no rows.
    """
    rows = list(rows)
    slots = Slots(rows)
    widths = [3.2, 0.8]
    if any(row.get("perplexity") is not None for row in rows):
        widths.append(0.8)
    figure, panels = blank_figure(
        rows,
        (WIDTH, slots.inches + 0.3),
        title=title or speed_message(rows),
        source=measured_here() if source is None else source,
        key=_key_of_speeds(rows),
        bars=True,
        ncols=len(widths),
        width_ratios=widths,
    )
    slots.write_names(panels[0])
    _write_column(
        panels[1], "of the limit", [f"{row['share_of_limit']:.0%}" for row in rows], slots
    )
    if len(widths) > 2:
        _write_column(panels[2], "perplexity", [_perplexity(row) for row in rows], slots)
    _draw_speeds(panels[0], rows, slots)
    return figure


def speed_message(rows: Sequence[dict[str, Any]]) -> str:
    """From the first row to the fastest one of its group, in one sentence."""
    first = rows[0] if rows else {}
    same_group = [row for row in rows if row.get("group") == first.get("group")]
    if len(same_group) < 2:
        return "Tokens per second"
    fastest = max(same_group, key=_speed)
    change = f"{_speed(first):,.0f} → {_speed(fastest):,.0f} tokens per second"
    return f"{change} with {fastest['name']}"


def _speed(row: Mapping[str, Any]) -> float:
    return row["tokens_per_second"]


def limit_of(row: Mapping[str, Any]) -> float:
    """Tokens per second that the bandwidth allows: those of the row over its share of the limit."""
    return row["tokens_per_second"] / row["share_of_limit"]


def _key_of_speeds(rows: Sequence[dict[str, Any]]) -> list[Key]:
    key = [Key("the limit: read bandwidth over the bytes of the weights", faint())]
    if any(_has_spread(row) for row in rows):
        key.append(Key("from the slowest to the fastest turn", ink(), "whisker"))
    return key


def _has_spread(row: Mapping[str, Any]) -> bool:
    return row.get("tokens_per_second_low") is not None


def _draw_speeds(axes: Any, rows: Sequence[dict[str, Any]], slots: Slots) -> None:
    speeds = [row["tokens_per_second"] for row in rows]
    limits = [limit_of(row) for row in rows]
    axes.barh(slots.places, limits, color=faint(), height=BAR)
    colors = []
    for row in rows:
        first_of_group = row is _first_of_group(row, rows)
        colors.append(REFERENCE if first_of_group else RECIPE)
    axes.barh(slots.places, speeds, color=colors, height=BAR)
    labels = [_speed_in_words(row, rows) for row in rows]
    ends = [max(pair) for pair in zip(speeds, limits, strict=True)]
    for position, (row, place) in enumerate(zip(rows, slots.places, strict=True)):
        if _has_spread(row):
            slowest = row["tokens_per_second_low"]
            fastest = row["tokens_per_second_high"]
            draw_whisker(axes, slowest, row["tokens_per_second"], fastest, place)
            ends[position] = max(ends[position], fastest)
    without_scale(axes, "tokens per second, and the limit", size=LABEL)
    slots.draw_zero(axes)
    room_for_labels(axes, ends, labels, LABEL)
    for end, place, label in zip(ends, slots.places, labels, strict=True):
        write_beside(axes, label, end, place, fontsize=LABEL)


def _first_of_group(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return next(each for each in rows if each.get("group") == row.get("group"))


def _speed_in_words(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """ "33" for the first row of a group, "146  4.4×" for the others."""
    words = f"{row['tokens_per_second']:,.0f}"
    first = _first_of_group(row, rows)
    if row is first:
        return words
    ratio = row.get("ratio") or row["tokens_per_second"] / first["tokens_per_second"]
    return f"{words}  {ratio:.2f}×"


def _perplexity(row: dict[str, Any]) -> str:
    if row.get("perplexity") is None:
        return ""
    return f"{row['perplexity']:.2f}"


def _write_column(axes: Any, heading: str, texts: Sequence[str], slots: Slots) -> None:
    """A column of numbers, each in the line of its row."""
    without_scale(axes, heading, size=LABEL)
    axes.set_xlim(0, 1)
    for text, place in zip(texts, slots.places, strict=True):
        write_beside(axes, text, 0, place, gap=0, fontsize=LABEL)


# --- the two terms --------------------------------------------------------------------------------


@page()
def overhead_chart(
    points: Mapping[str, Sequence[tuple[float, float]]],
    fits: Mapping[str, OverheadFit],
    *,
    title: str | None = None,
    source: str | None = None,
) -> Any:
    """Draw time per token against bytes of weights: each line begins at the overhead.

    Args:
        points: (bytes, seconds) by the name of the loop or kernel.
        fits: what `core.overhead_fit.fit_overhead` found for each of them.
        title: the message.
        source: where the numbers are from; by default this machine and today.
    Raises ValueError if there are no points, or if a name has no fit.
    """
    missing = [name for name in points if name not in fits]
    if missing:
        raise ValueError(f"no fit for {missing}: give one with fit_overhead for each of the points")
    figure, axes = blank_figure(
        points,
        (WIDTH, 3.6),
        title=title or "A fixed part, and the time to read the weights",
        source=measured_here() if source is None else source,
        key=[
            Key(_in_terms(name, fits[name]), line_color(number))
            for number, name in enumerate(points)
        ],
    )
    largest = max(size for each in points.values() for size, _ in each)
    lines = {}
    for name in points:
        fit = fits[name]
        ends = [(size, fit.seconds(size) * MILLISECONDS) for size in (0.0, 1.05 * largest)]
        lines[name] = [(size / 1e6, time) for size, time in ends]
    draw_curves(axes, lines)
    for number, each in enumerate(points.values()):
        sizes = [size / 1e6 for size, _ in each]
        times = [seconds * MILLISECONDS for _, seconds in each]
        axes.plot(sizes, times, "o", color=line_color(number), markersize=5)
    axes.set(xlabel="weights read for a token, MB", ylabel="time per token, ms")
    axes.set(xlim=(0, 1.05 * largest / 1e6))
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter("{x:,g}")
    name_ends(axes, lines, {name: name for name in points})
    return figure


def _in_terms(name: str, fit: OverheadFit) -> str:
    """ "decode loop: 2.1 ms + bytes / 24 GB/s" """
    return f"{name}: {fit.overhead * MILLISECONDS:.1f} ms + bytes / {fit.bandwidth / 1e9:.0f} GB/s"


# --- position -------------------------------------------------------------------------------------


@page()
def position_time_chart(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str | None = None,
    source: str | None = None,
) -> Any:
    """Draw the time of a token against its position in the text.

    Args:
        curves: (position, seconds) by name; the first is what the others are compared with.
        title: the message.
        source: where the numbers are from; by default this machine and today.
    Raises ValueError if there are no points.
    """
    in_milliseconds = {}
    for name, curve in curves.items():
        in_milliseconds[name] = [(place, seconds * MILLISECONDS) for place, seconds in curve]
    figure, axes = blank_figure(
        [point for curve in curves.values() for point in curve],
        (WIDTH, 3.4),
        title=title or "The time of a token at each position of a text",
        source=measured_here() if source is None else source,
    )
    draw_curves(axes, in_milliseconds)
    axes.set(xlabel="position in the text, tokens", ylabel="time per token, ms")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter("{x:,g}")
    name_ends(axes, in_milliseconds, {name: name for name in in_milliseconds})
    return figure


# --- speculation ----------------------------------------------------------------------------------


ONE = ((0.0, 1.0), (1.0, 1.0))  # the line of what speculation neither gains nor loses


class Speculated(NamedTuple):
    """One text that was written with speculation: the part of the drafted tokens that was accepted,
    and how many times as fast it was as writing token by token. `line` names its formula's line.
    """

    name: str
    acceptance: float
    speedup: float
    line: str = ""


@page()
def speculation_chart(
    points: Sequence[Speculated],
    *,
    formula: Mapping[str, Callable[[float], float]],
    title: str | None = None,
    source: str | None = None,
) -> Any:
    """Draw the measured speed-up against the acceptance, beside what the formula expects.

    Args:
        points: one per text.
        formula: the speed-up that is expected at an acceptance, by the name of the line; for
            instance `partial(predicted_speedup, draft_tokens=3, cost_ratio=0.0)`.
        title: the message.
        source: where the numbers are from; by default this machine and today.
    Raises ValueError if there are no points, for an acceptance outside of 0 to 1, and for a point
    on a line that has no formula.
    """
    for point in points:
        check_number(acceptance=point.acceptance, least=0)
        if point.acceptance > 1:
            raise ValueError(
                f"{point.name}: acceptance={point.acceptance}: give the accepted part of the "
                f"drafted tokens, from 0 to 1"
            )
        if point.line and point.line not in formula:
            raise ValueError(f"{point.name}: line={point.line!r}: give one of {[*formula]}")
    figure, axes = blank_figure(
        points,
        (WIDTH, 3.9),
        title=title or "What speculation gains, measured and by its formula",
        source=measured_here() if source is None else source,
    )
    lines = {name: _drawn_formula(expected) for name, expected in formula.items()}
    names = list(lines)
    draw_curves(axes, lines)
    axes.plot(*zip(*ONE, strict=True), color=muted(), linewidth=1, zorder=1)
    colors = []
    for point in points:
        color = RECIPE
        if point.line:
            color = line_color(names.index(point.line))
        axes.plot([point.acceptance], [point.speedup], "o", color=color, markersize=6.5, zorder=3)
        colors.append(color)
    axes.set(xlabel="accepted part of the drafted tokens", ylabel="times as fast as token by token")
    axes.set(xlim=(0, 1))
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter("{x:.0%}")
    name_ends(axes, lines, {name: name for name in lines})
    name_points(
        axes,
        [(point.acceptance, point.speedup) for point in points],
        [point.name for point in points],
        colors=colors,
        lines=[pair for line in [*lines.values(), ONE] for pair in itertools.pairwise(line)],
    )
    return figure


def _drawn_formula(expected: Callable[[float], float]) -> list[tuple[float, float]]:
    """A line of short pieces. It ends just before 1, where a formula may divide by zero."""
    acceptances = [number / 50 for number in range(50)] + [0.9999]
    return [(acceptance, expected(acceptance)) for acceptance in acceptances]


# --- batches --------------------------------------------------------------------------------------


class BatchStep(Protocol):
    """A measured step of a batch; whatever has these two numbers can be drawn."""

    batch: int
    seconds_per_step: float


@page()
def throughput_chart(
    curves: Mapping[str, Sequence[BatchStep]],
    *,
    title: str | None = None,
    source: str | None = None,
) -> Any:
    """Draw tokens per second of all texts together against the time that one text waits for one.

    Args:
        curves: what `inference.batching.throughput_table` measured, by the name of the precision.
        title: the message.
        source: where the numbers are from; by default this machine and today.
    Raises ValueError if there are no curves, and for numbers that are not positive.
    """
    figure, axes = blank_figure(
        [step for curve in curves.values() for step in curve],
        (WIDTH, 4.2),
        title=title or "What a batch writes per second, and how long each text waits",
        source=measured_here() if source is None else source,
    )
    lines = {}
    for name, curve in curves.items():
        lines[name] = [_wait_and_speed(step) for step in sorted(curve, key=_batch)]
    axes.set(xscale="log", yscale="log")
    axes.set(
        xlabel="wait of one text for its next token, ms", ylabel="tokens per second, all texts"
    )
    _set_limits(axes, lines)
    _draw_batches(axes, sorted({step.batch for curve in curves.values() for step in curve}))
    draw_curves(axes, lines, marker="o", markersize=4)
    name_ends(axes, lines, {name: name for name in lines})
    return figure


def _batch(step: BatchStep) -> int:
    return step.batch


def _wait_and_speed(step: BatchStep) -> tuple[float, float]:
    """Milliseconds that a text waits for its next token, and tokens per second of all texts."""
    seconds = step.seconds_per_step
    check_number(seconds_per_step=seconds, above=0)
    # All texts of a batch get their next token at the same time: each waits for the whole step.
    return seconds * MILLISECONDS, step.batch / seconds


def _set_limits(axes: Any, lines: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    waits = [wait for line in lines.values() for wait, _ in line]
    speeds = [speed for line in lines.values() for _, speed in line]
    axes.set_xlim(min(waits) / 1.25, max(waits) * 1.1)
    axes.set_ylim(min(speeds) / 1.25, max(speeds) * 1.35)
    _plain_ticks(axes.xaxis, min(waits), max(waits))
    _plain_ticks(axes.yaxis, min(speeds), max(speeds))
    axes.minorticks_off()


def _plain_ticks(axis: Any, low: float, high: float) -> None:
    """Ticks at 1, 2, 5, 10, 20 …, as far as there are points."""
    ticks = []
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        ticks += [step * 10.0**power for step in (1, 2, 5)]
    inside = [tick for tick in ticks if low / 1.25 <= tick <= high * 1.1]
    axis.set_ticks(inside, [f"{tick:,g}" for tick in inside])


def _draw_batches(axes: Any, batches: Sequence[int]) -> None:
    """A thin line per batch size: on it are all points of this size, for wait × speed = batch."""
    left, right = axes.get_xlim()
    bottom, top = axes.get_ylim()
    for batch in batches:
        size = batch * MILLISECONDS
        begin = max(left, size / top)
        end = min(right, size / bottom)
        if begin >= end:
            continue
        axes.plot([begin, end], [size / begin, size / end], color=faint(), linewidth=1, zorder=1)
        axes.annotate(
            f"batch {batch}" if batch == batches[0] else f"{batch}",
            (begin, size / begin),
            (3, -2),
            textcoords="offset points",
            va="top",
            fontsize=8.5,
            color=muted(),
        )
