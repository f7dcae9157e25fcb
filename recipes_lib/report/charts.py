"""Every chart of the notebooks and of the README. Each takes plain numbers and returns the figure.

bytes      chart          measured peaks of a ladder, predictions as ticks, seconds beside them
           budget_chart   of which terms the predicted peaks consist
           timeline_chart live bytes during a step, by kind, one panel per step
losses     loss_chart     held-out loss against optimizer steps
           change_chart   changes of the loss with their intervals
           position_chart loss against the position in a text
lengths    length_chart   the longest sequences of a ladder
           growth_chart   bytes against tokens; `slope` is the exponent of the growth
"""

from __future__ import annotations

import math
from typing import Any, Protocol

from recipes_lib.core.budget import Budget
from recipes_lib.core.machine import GIB
from recipes_lib.core.timeline import KINDS, Timeline
from recipes_lib.report.style import (
    KIND_COLORS,
    MIB,
    PREDICTED,
    RECIPE,
    REFERENCE,
    TERMS,
    TIME,
    blank_figure,
    legend_beside,
    percent,
)

BAR = 0.65  # the height of a bar; the next one begins at 1

# --- bytes ----------------------------------------------------------------------------------------


def chart(rows: list[dict[str, Any]], *, title: str) -> Any:
    """Draw the rows of a ladder or of a recorded results file.

    Peak memory is on the left, time per step on the right.
    """
    height = 0.45 * len(rows) + 1.3
    figure, axes = blank_figure(rows, (9, height), bars=True, ncols=2, width_ratios=(3, 1))
    memory, time = axes
    _draw_peaks(memory, rows)
    _draw_seconds(time, rows)
    figure.suptitle(title, fontsize=11)
    return figure


def _draw_peaks(axes: Any, rows: list[dict[str, Any]]) -> None:
    names = [row["name"] for row in rows]
    peaks = [row["peak_bytes"] / MIB for row in rows]
    predicted = [row["predicted_bytes"] / MIB for row in rows]
    axes.barh(names, peaks, color=_bar_colors(len(rows)), height=BAR)
    _draw_predictions(axes, predicted, names, markeredgewidth=2.5)
    for position, peak in enumerate(peaks):
        text = f"{peak:,.0f}"
        if position > 0:
            text += f"  ({percent(peak / peaks[0] - 1)})"
        # Beside the bar or the tick, whichever reaches further.
        _write_beside(axes, text, max(peak, predicted[position]), position, gap=6)
    # Bars start at zero, and the longest leaves room for its text.
    axes.set(xlabel="peak memory of tensors, MiB", xlim=(0, max(peaks) * 1.22))
    axes.legend(loc="lower right", frameon=False)


def _draw_seconds(axes: Any, rows: list[dict[str, Any]]) -> None:
    names = [row["name"] for row in rows]
    seconds = [row["seconds"] for row in rows]
    axes.barh(names, seconds, color=TIME, height=BAR)
    for position, value in enumerate(seconds):
        text = f"{value:.0f}"
        if value < 10:
            text = f"{value:.2g}"
        _write_beside(axes, text, value, position, gap=4)
    axes.set(xlabel="seconds per step", xlim=(0, max(seconds) * 1.25))


def budget_chart(budgets: dict[str, Budget]) -> Any:
    """Draw predicted budgets as stacked bars, one per step: which term does each recipe shrink?"""
    figure, axes = blank_figure(budgets, (9, 0.4 * len(budgets) + 1.3), bars=True)
    left = [0.0] * len(budgets)  # where the next part of each bar begins
    for term, color in TERMS.items():
        sizes = [budget.at_peak()[term] / MIB for budget in budgets.values()]
        axes.barh(list(budgets), sizes, left=left, color=color, height=BAR, label=term)
        left = [begin + size for begin, size in zip(left, sizes, strict=True)]
    axes.set(xlabel="predicted bytes at the moment of the peak, MiB")
    axes.legend(loc="lower right", frameon=False)
    return figure


def timeline_chart(
    timelines: dict[str, Timeline], *, predicted: dict[str, int] | None = None
) -> Any:
    """Draw the live bytes of one step per panel, stacked by kind, on one scale.

    The phases are shaded and named, the peak is marked with what it consists of, and `predicted`
    (bytes by the same names) is a dashed line.
    """
    size = (9, 2.6 * len(timelines) + 0.4)
    figure, panels = blank_figure(timelines, size, nrows=len(timelines), squeeze=False)
    if predicted is None:
        predicted = {}
    highest = max(timeline.peak for timeline in timelines.values())
    top = max([highest, *predicted.values()]) / MIB
    for axes, (name, timeline) in zip(panels[:, 0], timelines.items(), strict=True):
        _stack_kinds(axes, timeline)
        axes.set(ylim=(0, 1.3 * top), ylabel="live bytes, MiB")
        axes.set_title(name, loc="left", fontsize=10, fontweight="bold")
        _shade_phases(axes, timeline)
        _mark_peak(axes, timeline)
        if name in predicted:
            _draw_prediction_line(axes, predicted[name] / MIB)
    panels[-1, 0].set(xlabel="operators of the step, in their order")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    # Outside of the panels: inside there is always a timeline that runs through it.
    figure.legend(handles, labels, loc="outside upper right", frameon=False, ncols=len(KINDS))
    return figure


def _stack_kinds(axes: Any, timeline: Timeline) -> None:
    operators = [point.operator for point in timeline.points]
    # What stays for the whole step is at the bottom, what comes and goes is above it.
    layers = [_mib_of_kind(timeline, kind) for kind in KINDS]
    colors = [KIND_COLORS[kind] for kind in KINDS]
    # Between two points nothing changes: the bytes go up and down in steps.
    axes.stackplot(operators, layers, colors=colors, labels=KINDS, step="post", linewidth=0)
    axes.set(xlim=(operators[0], operators[-1]))


def _mib_of_kind(timeline: Timeline, kind: str) -> list[float]:
    return [point.bytes[kind] / MIB for point in timeline.points]


def _shade_phases(axes: Any, timeline: Timeline) -> None:
    width = timeline.points[-1].operator - timeline.points[0].operator
    for number, (phase, first, last) in enumerate(timeline.phases()):
        if number % 2 == 1:
            axes.axvspan(first, last, color=REFERENCE, alpha=0.18, linewidth=0, zorder=0)
        if last - first > 0.08 * width:  # a narrower phase has no room for its name
            place = ((first + last) / 2, 0.97)
            axes.annotate(phase, place, xycoords=("data", "axes fraction"), ha="center", va="top")


def _mark_peak(axes: Any, timeline: Timeline) -> None:
    point = timeline.highest
    height = point.total / MIB
    kinds = [
        f"{kind} {size / MIB:,.0f}"
        for kind, size in point.bytes.items()
        if size > 0.01 * point.total
    ]
    text = f"peak {height:,.0f} MiB\n" + "\n".join(kinds)
    axes.plot([point.operator], [height], "o", color=PREDICTED, markersize=4)
    # The text goes to the side that has more room.
    first = timeline.points[0].operator
    last = timeline.points[-1].operator
    in_right_half = point.operator - first > (last - first) / 2
    side = "right" if in_right_half else "left"
    offset = (-8, -4) if in_right_half else (8, -4)
    box = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 2}
    axes.annotate(
        text,
        (point.operator, height),
        offset,
        textcoords="offset points",
        ha=side,
        va="top",
        fontsize=8,
        bbox=box,
    )


def _draw_prediction_line(axes: Any, height: float) -> None:
    axes.axhline(height, color=PREDICTED, linestyle="--", linewidth=1)
    text = f"predicted {height:,.0f} MiB"
    place = (0.005, height)
    axes.annotate(
        text,
        place,
        (0, 3),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        fontsize=8,
    )


# --- losses ---------------------------------------------------------------------------------------


def loss_chart(curves: dict[str, list[tuple[int, float]]]) -> Any:
    """Draw curves of (optimizer step, held-out loss), one line per training run."""
    points = [point for curve in curves.values() for point in curve]
    figure, axes = blank_figure(points, (7, 3))
    for name, curve in curves.items():
        steps, losses = zip(*curve, strict=True)
        axes.plot(steps, losses, marker="o", label=name)
    axes.set(xlabel="optimizer step", ylabel="held-out loss, nats per token")
    axes.locator_params(axis="x", integer=True)
    legend_beside(axes)
    return figure


class Change(Protocol):
    """A measured change with its interval; whatever has these three numbers can be drawn."""

    difference: float
    low: float
    high: float


def change_chart(changes: dict[str, Change]) -> Any:
    """Draw changes of the held-out loss with their intervals, beside the line of no change."""
    figure, axes = blank_figure(changes, (7, 0.35 * len(changes) + 1), bars=True)
    for name, change in changes.items():
        below = change.difference - change.low
        above = change.high - change.difference
        reach = [[below], [above]]  # two lengths: an interval need not be symmetric
        axes.errorbar(change.difference, name, xerr=reach, fmt="o", color=RECIPE, capsize=4)
    axes.axvline(0, color=REFERENCE, linewidth=1)
    label = "change of the held-out loss, nats per token (left of the line: better)"
    axes.set(xlabel=label, ymargin=0.15)
    return figure


def position_chart(curves: dict[str, list[float]], *, window: int, trained: int, title: str) -> Any:
    """Draw the loss of every `window` tokens against their position in the text.

    A line marks where the length of the training ends.
    """
    figure, axes = blank_figure(curves, (8, 3.2))
    for name, losses in curves.items():
        # Each loss is the mean of a window, so its point belongs into the middle.
        middles = [(index + 0.5) * window for index in range(len(losses))]
        axes.plot(middles, losses, label=name, alpha=0.8)
    axes.axvline(trained, color=REFERENCE, linestyle="--", linewidth=1)
    axes.set(
        xlabel="position in the text (dashed: length of the training)",
        ylabel="loss, nats per token",
    )
    legend_beside(axes)
    figure.suptitle(title, fontsize=11)
    return figure


# --- lengths --------------------------------------------------------------------------------------


def length_chart(rows: list[dict[str, Any]], *, title: str) -> Any:
    """Draw the rows of a ladder of lengths or of a recorded results file.

    The axis is logarithmic: recipes multiply the length.
    """
    figure, axes = blank_figure(rows, (9, 0.42 * len(rows) + 1.3), bars=True)
    names = [row["name"] for row in rows]
    tokens = [row["tokens"] for row in rows]
    predicted = [row["predicted_tokens"] for row in rows]
    axes.barh(names, tokens, color=_bar_colors(len(rows)), height=BAR)
    _draw_predictions(axes, predicted, names)
    for position, length in enumerate(tokens):
        _write_beside(axes, f"{length:,}", length, position, gap=8)
    axes.set(
        xscale="log",
        xlabel="longest sequence that fits, tokens",
        xlim=(min(tokens) / 2, max(tokens) * 2),
    )
    axes.legend(loc="upper right", frameon=False)
    figure.suptitle(title, fontsize=11)
    return figure


def growth_chart(curves: dict[str, dict[int, int]], *, fixed_bytes: int, limit_bytes: int) -> Any:
    """Draw bytes beyond the fixed ones against tokens, both logarithmic.

    The legend gives the slope at the end. With a slope of 2, twice the tokens take four times the
    memory.
    """
    figure, axes = blank_figure(curves, (8, 3.6))
    for name, curve in curves.items():
        tokens = sorted(curve)
        grown = [(curve[length] - fixed_bytes) / GIB for length in tokens]
        label = f"{name}: slope {slope(curve, fixed_bytes):.2f}"
        axes.plot(tokens, grown, marker="o", markersize=3.5, label=label)
    left_for_tokens = (limit_bytes - fixed_bytes) / GIB
    label = f"the limit: {limit_bytes / GIB:.1f} GiB"
    axes.axhline(left_for_tokens, color=REFERENCE, linestyle="--", linewidth=1, label=label)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="tokens in the sequence",
        ylabel="GiB beyond weights and states",
    )
    legend_beside(axes)
    return figure


def slope(curve: dict[int, int], fixed_bytes: int = 0) -> float:
    """Exponent of the growth between the two longest lengths of a curve {tokens: bytes}.

    `fixed_bytes` are there at any length, and do not grow.
    """
    before_last, last = sorted(curve)[-2:]
    growth = (curve[last] - fixed_bytes) / (curve[before_last] - fixed_bytes)
    return math.log(growth) / math.log(last / before_last)


# --- what the bars of ladders have in common ------------------------------------------------------


def _bar_colors(count: int) -> list[str]:
    """The first row is the baseline, the others are recipes."""
    return [REFERENCE] + [RECIPE] * (count - 1)


def _draw_predictions(axes: Any, values: list[float], names: list[str], **options: Any) -> None:
    """A tick on each bar where the arithmetic expected its end."""
    axes.plot(values, names, "|", color=PREDICTED, markersize=15, label="predicted", **options)


def _write_beside(axes: Any, text: str, x: float, y: float, *, gap: int) -> None:
    """Text to the right of (x, y), `gap` points away, whatever the scale of the axis."""
    axes.annotate(text, (x, y), (gap, 0), textcoords="offset points", va="center")
