"""What all charts have in common: colours with one meaning each, a figure without frames, units.

    figure, axes = blank_figure(rows, (9, 3), bars=True)
    axes.barh(names, sizes, color=RECIPE)

A colour means the same in every chart: whoever has read one can read the next.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

MIB = 2**20

# --- the palette ----------------------------------------------------------------------------------

REFERENCE = "#9aa5b1"  # what others are compared with: the baseline, a limit, the line of no change
RECIPE = "#2f6f9f"  # what a recipe was measured to take
PREDICTED = "#1b1f24"  # what arithmetic expected, before anything was measured
TIME = "#c9d3dc"  # seconds, beside the bytes that are the subject

# The terms of a budget, in the order in which they are stacked.
TERMS = {
    "weights": "#8c7361",
    "states": "#7b5ea7",
    "gradients": "#d1495b",
    "activations": "#edae49",
    "loss": "#66a182",
}

# The kinds of a timeline have the colours of a budget's terms. It cannot tell which bytes
# are the loss's: they are among the others.
KIND_COLORS = {
    "weights": TERMS["weights"],
    "states": TERMS["states"],
    "gradients": TERMS["gradients"],
    "activations": TERMS["activations"],
    "other": "#b8c4ce",
}

# --- figures --------------------------------------------------------------------------------------


def blank_figure(
    content: Collection[Any], size: tuple[float, float], *, bars: bool = False, **options: Any
) -> tuple[Any, Any]:
    """A figure of `size` inches without frames, and its axes.

    Args:
        content: what will be drawn; only looked at to refuse a chart of nothing.
        bars: the chart has horizontal bars with names: no left frame, and the first name on top.
        options: of `matplotlib.pyplot.subplots`, for instance `ncols`.
    Raises ValueError if there is nothing to draw.
    """
    if not content:
        raise ValueError("there is nothing to draw: add a row or a point first")
    import matplotlib.pyplot as plt  # here, because it takes long and few callers draw

    figure, axes = plt.subplots(figsize=size, sharey=bars, layout="constrained", **options)
    # A notebook shows what a cell returns. It would show a figure that is still open once more.
    plt.close(figure)
    for each in figure.axes:
        each.spines[["top", "right"]].set_visible(False)
        if bars:
            each.spines["left"].set_visible(False)
            each.tick_params(axis="y", length=0)
    if bars:
        figure.axes[0].invert_yaxis()  # the axes share it: once turns all of them
    return figure, axes


def legend_beside(axes: Any) -> None:
    """Put the legend to the right of the axes: curves may go anywhere inside."""
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))


# --- numbers --------------------------------------------------------------------------------------


def percent(change: float) -> str:
    """A change as a signed whole number of per cent."""
    # `+ 0.0` turns the -0.0 that rounding may leave into 0.0: "-0%" would read like a loss.
    return f"{round(change, 2) + 0.0:+.0%}"


def mib(size: float) -> str:
    """Bytes as whole MiB."""
    return f"{size / MIB:,.0f} MiB"
