"""The grid of a pipeline: what each rank computes when, and in grey when it has nothing to do.

    pipeline_chart({"GPipe": actions, "1F1B": actions, "interleaved": actions})

The actions are measured ones, or those that `core.pipeline_grid.place` makes from a schedule and
the measured seconds of its stages. One schedule is below the other, on one scale of time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.colors import to_rgb

from recipes_lib.core.ranks.pipeline_grid import BACKWARD, FORWARD, Action, bubble_of, span
from recipes_lib.report.figure import WIDTH, Key, blank_figure, faint, ink, page
from recipes_lib.report.labels import POINTS, readable_on, text_width
from recipes_lib.report.lanes_chart import COLORS
from recipes_lib.report.style import MILLISECONDS

RANK = 0.27  # inches of a rank's line
BETWEEN = 0.42  # inches between two grids, where the name of one stands
CELL = 0.84  # of a rank's line is filled
NUMBER = 7.5  # points of the number of a micro-batch
PALE = 0.45  # how far the colour of a rank's later stages is towards the paper


@page()
def pipeline_chart(
    grids: Mapping[str, Sequence[Action]],
    *,
    title: str | None = None,
    source: str | None = None,
) -> Any:
    """Draw one grid per schedule: a line per rank, a cell per forward and backward.

    The number in a cell is that of the micro-batch. Where a rank has several stages, the cells of
    the later ones are paler. Grey is the bubble: a rank waits, or has not begun, or has ended.

    Args:
        grids: actions with times, by the name of the schedule.
        title: the message; by default which schedule leaves the ranks idle for how long.
        source: where the numbers are from; by default this machine and today.
    Raises ValueError if there are no grids, and for actions without times.
    """
    bubbles = {name: bubble_of(actions) for name, actions in grids.items()}
    heights = [_ranks_of(actions) for actions in grids.values()]
    figure, panels = blank_figure(
        grids,
        (WIDTH, RANK * sum(heights) + BETWEEN * len(heights) + 0.4),
        title=title or _message(bubbles),
        source=source,
        key=_key(grids),
        nrows=len(grids),
        sharex=True,
        squeeze=False,
        gridspec_kw={"height_ratios": heights},
    )
    for axes, (name, actions) in zip(panels[:, 0], grids.items(), strict=True):
        _draw_grid(axes, actions)
        milliseconds = MILLISECONDS * span(actions)
        axes.set_title(f"{name}: {bubbles[name]:.0%} idle, {_digits(milliseconds)} ms")
    longest = max(span(actions) for actions in grids.values())
    panels[-1, 0].set(xlabel="milliseconds", xlim=(0, 1.005 * MILLISECONDS * longest))
    figure.draw_without_rendering()  # only then are the panels as wide as they will be
    for axes, actions in zip(panels[:, 0], grids.values(), strict=True):
        _write_numbers(axes, actions)
    return figure


def _message(bubbles: Mapping[str, float]) -> str:
    """Which schedule has the smallest bubble, and which the largest."""
    if not bubbles:
        return ""  # nothing to draw, which is refused in a moment
    best = min(bubbles, key=bubbles.__getitem__)
    worst = max(bubbles, key=bubbles.__getitem__)
    least = f"{bubbles[best]:.0%}"
    most = f"{bubbles[worst]:.0%}"
    if least == most:
        return f"The ranks are idle for {least} of the time"
    message = f"{best} leaves the ranks idle for {least} of the time, {worst} for {most}"
    return message[0].upper() + message[1:]


def _key(grids: Mapping[str, Sequence[Action]]) -> list[Key]:
    key = [Key("forward", COLORS[FORWARD]), Key("backward", COLORS[BACKWARD])]
    every = [action for actions in grids.values() for action in actions]
    if any(_is_later(action, actions) for actions in grids.values() for action in actions):
        for direction in (FORWARD, BACKWARD):
            key.append(Key(f"{direction} of a later stage", _pale(COLORS[direction])))
    if every:
        key.append(Key("idle: the bubble", faint()))
    return key


def _draw_grid(axes: Any, actions: Sequence[Action]) -> None:
    ranks = _ranks_of(actions)
    first = min(action.begin for action in actions)
    axes.barh(range(ranks), MILLISECONDS * span(actions), height=CELL, color=faint())
    axes.barh(
        [action.rank for action in actions],
        [MILLISECONDS * action.seconds for action in actions],
        left=[MILLISECONDS * (action.begin - first) for action in actions],
        height=CELL,
        color=[_color(action, actions) for action in actions],
        edgecolor=axes.figure.get_facecolor(),
        linewidth=0.4,
    )
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.tick_params(axis="y", length=0, labelcolor=ink(), labelsize=8.5)
    axes.tick_params(axis="x", labelsize=8.5)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set_ylim(ranks - 0.5, -0.5)  # rank 0 is on top
    axes.spines["left"].set_visible(False)


def _write_numbers(axes: Any, actions: Sequence[Action]) -> None:
    """The number of the micro-batch in each cell that is wide enough for it."""
    first = min(action.begin for action in actions)
    left, right = axes.get_xlim()
    width = axes.get_window_extent().width / axes.figure.dpi * POINTS
    per_second = MILLISECONDS * width / (right - left)
    for action in actions:
        text = str(action.micro_batch)
        if text_width(text, size=NUMBER) + 2 > per_second * action.seconds:
            continue
        middle = (action.begin + action.end) / 2 - first
        axes.text(
            MILLISECONDS * middle,
            action.rank,
            text,
            fontsize=NUMBER,
            color=readable_on(_color(action, actions)),
            ha="center",
            va="center_baseline",
        )


def _color(action: Action, actions: Sequence[Action]) -> Any:
    color = COLORS[action.direction]
    if _is_later(action, actions):
        return _pale(color)
    return color


def _is_later(action: Action, actions: Sequence[Action]) -> bool:
    """Whether it is not the first stage of its rank: stage s is on rank s modulo the ranks."""
    return action.stage >= _ranks_of(actions)


def _pale(color: str) -> tuple[float, ...]:
    """The colour, mixed with white."""
    return tuple(part + PALE * (1 - part) for part in to_rgb(color))


def _ranks_of(actions: Sequence[Action]) -> int:
    return 1 + max(action.rank for action in actions)


def _digits(milliseconds: float) -> str:
    if milliseconds < 10:
        return f"{milliseconds:.1f}"
    return f"{milliseconds:,.0f}"
