"""What charts of curves have in common: lines that differ without colour, names at their ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recipes_lib.report.figure import LINE
from recipes_lib.report.labels import POINTS, keep_apart
from recipes_lib.report.style import DASHES, LINES

NAME_SIZE = 9.5

Curves = dict[str, Sequence[tuple[float, float]]]  # (x, y) from left to right, by name


def draw_curves(axes: Any, curves: Curves, **look: Any) -> None:
    """One line per curve. Its dashes are its own as well: colours alone are not for everyone."""
    for number, (name, points) in enumerate(curves.items()):
        xs = [x for x, _ in points]
        ys = [y for _, y in points]
        axes.plot(
            xs,
            ys,
            label=name,
            color=line_color(number),
            linestyle=DASHES[number % len(DASHES)],
            linewidth=1.8,
            **look,
        )


def line_color(number: int) -> str:
    """The colour of a chart's curve of this number."""
    return LINES[number % len(LINES)]


def name_ends(axes: Any, curves: Curves, texts: dict[str, str] | None = None) -> None:
    """Write each curve's text to the right of its end, so that no two texts overlap.

    Without `texts` by name, the text of a curve is its name.
    """
    if texts is None:
        texts = {name: name for name in curves}
    heights = _heights_of_names(axes, curves)
    for number, (name, points) in enumerate(curves.items()):
        axes.annotate(
            texts[name],
            (1, heights[number]),
            (8, 0),
            xycoords="axes fraction",
            textcoords="offset points",
            va="center",
            color=line_color(number),
            fontsize=NAME_SIZE,
            fontweight="bold",
            annotation_clip=False,  # it stands outside of the axes
        )
        _lead_to(axes, points[-1], heights[number], line_color(number))


def _heights_of_names(axes: Any, curves: Curves) -> list[float]:
    """How high each curve ends, as a part of the axes; apart by a line of text at least."""
    axes.figure.draw_without_rendering()  # only then is the panel as high as it will be
    # In dots, because a line of text is as high on every scale.
    ends = [axes.transData.transform(points[-1]) for points in curves.values()]
    line = LINE * NAME_SIZE / POINTS * axes.figure.dpi
    heights = keep_apart([float(y) for _, y in ends], line)
    panel = axes.get_window_extent()
    return [(height - panel.y0) / panel.height for height in heights]


def _lead_to(axes: Any, end: tuple[float, float], height: float, color: str) -> None:
    """A thin line from the end of a curve to its name, which may stand higher or lower."""
    axes.annotate(
        "",
        xy=end,
        xytext=(1, height),
        textcoords="axes fraction",
        arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.7, "alpha": 0.6},
        annotation_clip=False,
    )
