"""Charts of losses. Each takes plain numbers and returns the figure.

loss_chart     held-out loss against optimizer steps
change_chart   changes of the loss with their intervals
position_chart loss against the position in a text
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Protocol

from recipes_lib.report.bars import Slots, draw_whisker
from recipes_lib.report.curves import draw_curves, line_color, name_ends
from recipes_lib.report.figure import WIDTH, blank_figure, muted, page
from recipes_lib.report.style import RECIPE, REFERENCE


@page()
def loss_chart(
    curves: dict[str, Sequence[tuple[float, float]]],
    *,
    title: str | None = None,
    source: str | None = None,
) -> Any:
    """Draw curves of (optimizer step, held-out loss), one line per training run.

    Args:
        curves: by the name of the run; the first is what the others are compared with.
        title: the message.
        source: where the numbers are from; by default this machine and today.
    Raises ValueError if there are no points.
    """
    points = [point for curve in curves.values() for point in curve]  # empty curves draw nothing
    figure, axes = blank_figure(
        points,
        (WIDTH, 3.2),
        title=title or "Held-out loss",
        source=source,
    )
    draw_curves(axes, curves, marker="o", markersize=4)
    axes.set(xlabel="optimizer step", ylabel="held-out loss, nats per token")
    axes.locator_params(axis="x", integer=True)  # there is no half of a step
    ends = {name: f"{name}  {curve[-1][1]:.2f}" for name, curve in curves.items()}
    name_ends(axes, curves, ends)
    return figure


class Change(Protocol):
    """A measured change with its interval; whatever has these three numbers can be drawn."""

    difference: float
    low: float
    high: float


@page()
def change_chart(
    changes: dict[str, Change], *, title: str | None = None, source: str | None = None
) -> Any:
    """Draw changes of the held-out loss with their intervals, beside the line of no change.

    Args:
        changes: by the name of the run.
        title: the message.
        source: where the numbers are from, and of what level the intervals are; by default this
            machine and today.
    Raises ValueError if there are no changes.
    """
    rows = [{"name": name} for name in changes]
    slots = Slots(rows)
    figure, axes = blank_figure(
        rows,
        (WIDTH, slots.inches + 0.7),
        title=title or "How much training has changed the held-out loss",
        source=source,
        bars=True,
    )
    slots.write_names(axes)
    axes.axvline(0, color=REFERENCE, linewidth=1)
    for place, change in zip(slots.places, changes.values(), strict=True):
        draw_whisker(axes, change.low, change.difference, change.high, place)
        axes.plot([change.difference], [place], "o", color=RECIPE, markersize=7)
        # In a column at the right edge: beside its point it would lie on the interval.
        text = f"{change.difference:+.2f}  ({change.low:+.2f} to {change.high:+.2f})"
        at_right = {"xycoords": ("axes fraction", "data"), "annotation_clip": False}
        axes.annotate(text, (1.02, place), va="center", fontsize=9.5, **at_right)
    axes.set(xlabel="change of the held-out loss, nats per token (left of the line: better)")
    return figure


@page()
def position_chart(
    losses: dict[str, Sequence[Sequence[float]]],
    *,
    window: int,
    trained: int,
    title: str,
    source: str = "",
) -> Any:
    """Draw the loss of every `window` tokens against their position in the text.

    Above are means over the texts. Texts differ more from each other than the variants do, so
    below is the difference to the first variant on the same text: its mean over the texts, and a
    band from the lowest to the highest.

    Args:
        losses: by the name of the variant, one list per text with the mean loss of each window; all
            variants have the same texts, and all texts the same length.
        trained: the length of the training, in tokens; a dashed line marks it.
        title: the message.
        source: where the numbers are from. Often they are recorded ones, so nothing is assumed.
    Raises ValueError if there are no losses.
    """
    figure, (above, below) = blank_figure(
        losses,
        (WIDTH, 5.4),
        title=title,
        source=source,
        nrows=2,
        sharex=True,
    )
    first, reference = next(iter(losses.items()))
    means = {}
    differences = {}
    for number, (name, texts) in enumerate(losses.items()):
        against_first = _differences(texts, reference)
        means[name] = _middles(_means(texts), window)
        differences[name] = _middles(_means(against_first), window)
        _draw_band(below, against_first, window, color=line_color(number))
    draw_curves(above, means)
    draw_curves(below, differences)
    _mark_training(above, trained)
    _mark_training(below, trained, named=False)
    above.set(ylabel="loss, nats per token")
    end = window * len(means[first])
    below.set(xlabel="position in the text, tokens", ylabel=f"minus {first!r}", xlim=(0, end))
    below.xaxis.set_major_formatter("{x:,g}")
    name_ends(above, means)
    name_ends(below, differences)
    return figure


def _differences(
    texts: Sequence[Sequence[float]], reference: Sequence[Sequence[float]]
) -> list[list[float]]:
    """Text by text and window by window: the losses minus those of the reference."""
    differences = []
    for text, plain in zip(texts, reference, strict=True):
        differences.append([loss - other for loss, other in zip(text, plain, strict=True)])
    return differences


def _draw_band(axes: Any, texts: Sequence[Sequence[float]], window: int, *, color: str) -> None:
    """From the lowest text to the highest, window by window."""
    by_window = list(zip(*texts, strict=True))
    lowest = [min(values) for values in by_window]
    highest = [max(values) for values in by_window]
    places = [place for place, _ in _middles(lowest, window)]
    axes.fill_between(places, lowest, highest, color=color, alpha=0.2, linewidth=0)


def _means(texts: Sequence[Sequence[float]]) -> list[float]:
    """The mean over the texts, window by window."""
    return [statistics.fmean(values) for values in zip(*texts, strict=True)]


def _middles(losses: Sequence[float], window: int) -> list[tuple[float, float]]:
    """Each loss is the mean of a window, so its point belongs into the middle."""
    return [((number + 0.5) * window, loss) for number, loss in enumerate(losses)]


def _mark_training(axes: Any, trained: int, *, named: bool = True) -> None:
    """A dashed line where the positions end that training has seen."""
    axes.axvline(trained, color=muted(), linestyle="--", linewidth=1)
    if not named:
        return
    axes.annotate(
        f"trained up to {trained:,}",
        (trained, 1),
        (-5, -2),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="right",
        va="top",
        color=muted(),
        fontsize=9,
    )
