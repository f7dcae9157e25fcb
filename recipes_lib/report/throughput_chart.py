"""What a batch brings and costs: tokens per second of all texts, against the wait of each of them.

    throughput_chart({"bf16": steps})    steps with `batch` and `seconds_per_step`

A larger batch writes more per second, and each of its texts waits longer for its next token. The
chart shows both, so that a limit for the one gives the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from recipes_lib.core.checks import check_number
from recipes_lib.report.curves import draw_curves, name_ends
from recipes_lib.report.figure import WIDTH, blank_figure, faint, muted, page
from recipes_lib.report.style import MILLISECONDS


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
        source=source,
    )
    lines = {}
    for name, curve in curves.items():
        lines[name] = [_wait_and_speed(step) for step in sorted(curve, key=_batch)]
    # Both grow by factors from one batch to the next. And on two logarithmic axes the points of one
    # batch size are on a straight line.
    axes.set(xscale="log", yscale="log")
    axes.set(
        xlabel="wait of one text for its next token, ms", ylabel="tokens per second, all texts"
    )
    _set_limits(axes, lines)
    _draw_batches(axes, sorted({step.batch for curve in curves.values() for step in curve}))
    draw_curves(axes, lines, marker="o", markersize=4)
    name_ends(axes, lines)
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
    # More air above: the names of the batch sizes begin there.
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
        product = batch * MILLISECONDS  # of the wait in milliseconds and the speed
        # The part of the line that is inside the axes: it enters on the left or at the top.
        begin = max(left, product / top)
        end = min(right, product / bottom)
        if begin >= end:
            continue
        waits = [begin, end]
        speeds = [product / wait for wait in waits]
        axes.plot(waits, speeds, color=faint(), linewidth=1, zorder=1)
        name = f"{batch}"
        if batch == batches[0]:
            name = f"batch {batch}"  # the first one says what the numbers are
        axes.annotate(
            name,
            (waits[0], speeds[0]),
            (3, -2),
            textcoords="offset points",
            va="top",
            fontsize=8.5,
            color=muted(),
        )
