"""Charts of losses. Each takes plain numbers and returns the figure.

loss_chart     held-out loss against optimizer steps
change_chart   changes of the loss with their intervals
position_chart loss against the position in a text
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from recipes_lib.report.bars import Slots, draw_whisker
from recipes_lib.report.curves import draw_curves, name_ends
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
    curves: dict[str, list[float]],
    *,
    window: int,
    trained: int,
    title: str,
    source: str = "",
) -> Any:
    """Draw the loss of every `window` tokens against their position in the text.

    Args:
        curves: mean losses of the windows, by name; the first is what the others are compared with.
        trained: the length of the training, in tokens; a dashed line marks it.
        title: the message.
        source: where the numbers are from. Often they are recorded ones, so nothing is assumed.
    Raises ValueError if there are no curves.
    """
    points = {}
    for name, losses in curves.items():
        points[name] = _middles(losses, window)
    figure, axes = blank_figure(
        curves,
        (WIDTH, 3.4),
        title=title,
        source=source,
    )
    draw_curves(axes, points)
    end = window * max(len(losses) for losses in curves.values())
    _mark_training(axes, trained)
    axes.set(xlabel="position in the text, tokens", ylabel="loss, nats per token", xlim=(0, end))
    axes.xaxis.set_major_formatter("{x:,g}")
    name_ends(axes, points)
    return figure


def _middles(losses: Sequence[float], window: int) -> list[tuple[float, float]]:
    """Each loss is the mean of a window, so its point belongs into the middle."""
    return [((number + 0.5) * window, loss) for number, loss in enumerate(losses)]


def _mark_training(axes: Any, trained: int) -> None:
    """A dashed line where the positions end that training has seen."""
    axes.axvline(trained, color=muted(), linestyle="--", linewidth=1)
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
