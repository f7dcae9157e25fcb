"""A figure without a ground, with its message on top and its source at the bottom.

    figure, axes = new_figure("Three steps", height=3)
    axes.plot([1, 4, 2], color=RECIPE)
    figure                      # the last line of a cell shows it; figure.save("three.png")

It reads on a light and on a dark page: no paper of its own, and grey ink between both. As a picture
it has 64 colours, which keeps it below 60 KB.
"""

from __future__ import annotations

import base64
import io
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.textpath import TextPath
from matplotlib.ticker import LogLocator, NullLocator
from PIL import Image

from recipes_lib.report.style import INK, MARK, measured_here

DPI = 110
WIDTH = 8.4  # inches of a chart
NARROW = 5.2  # inches of a chart whose words can also be read on a phone
POINTS = 72  # per inch
COLORS = 64  # of a picture

LOOK = {
    "axes.edgecolor": INK,
    "axes.facecolor": "none",
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "figure.facecolor": "none",
    "font.size": 10,
    "legend.frameon": False,
    "savefig.facecolor": "none",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}
# A mark has to be seen on bars of all colours and on both pages: dark, with a white edge.
WHITE_EDGE = [withStroke(linewidth=3.6, foreground="white")]


class Chart(Figure):
    """A figure that a notebook shows as a small picture, and in words for who cannot see it."""

    message = ""

    def png(self) -> bytes:
        """The figure as a picture, in few colours."""
        file = io.BytesIO()
        FigureCanvasAgg(self).print_png(file)
        few = Image.open(file).quantize(COLORS, method=Image.Quantize.FASTOCTREE)
        file = io.BytesIO()
        few.save(file, format="png", optimize=True)
        return file.getvalue()

    def save(self, path: Path | str) -> None:
        """Write the figure as a picture."""
        Path(path).write_bytes(self.png())

    # What Jupyter shows, by this name.
    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        picture = base64.b64encode(self.png()).decode()
        return {"image/png": picture, "text/plain": self.message}


def new_figure(
    title: str,
    *,
    height: float = 3.4,
    width: float = WIDTH,
    source: str | None = None,
    key: dict[str, str] | None = None,
    marks: Sequence[Any] = (),
    **subplots: Any,
) -> tuple[Chart, Any]:
    """A figure with its axes. From here on matplotlib draws in our colours, in the whole process.

    Args:
        title: the message, in one sentence.
        height: inches, without the key.
        width: inches; NARROW for phones.
        source: where the numbers are from. None: measured on this machine, today.
        key: what the colours mean.
        marks: further entries of the key, as artists with a label.
        subplots: of `Figure.subplots`, for instance `ncols`.
    """
    mpl.rcParams.update(LOOK)
    handles = [Patch(color=color, label=name) for name, color in (key or {}).items()]
    handles += marks
    fit_in_a_line = sum(text_width(each.get_label(), 9) + 45 for each in handles) < width * POINTS
    columns = max(len(handles), 1) if fit_in_a_line else round(width / 2)
    height += 0.22 * math.ceil(len(handles) / columns)
    figure = Chart(figsize=(width, height), dpi=DPI, layout="constrained")
    figure.message = title
    # Title and key are one box: the layout keeps room for one at each edge.
    box = figure.legend(
        handles=handles,
        loc="outside upper left",
        title=textwrap.fill(title, round(10 * width)),
        title_fontproperties={"weight": "bold", "size": 12},
        alignment="left",
        ncols=columns,
        fontsize=9,
        handlelength=1.2,
        borderpad=0.2,
        borderaxespad=0.2,
    )
    box.get_title().set_linespacing(1.2)
    if source is None:
        source = measured_here()
    if source:
        figure.supxlabel(textwrap.fill(source, round(16.6 * width)), x=0.005, ha="left", fontsize=8)
    return figure, figure.subplots(**subplots)


def mark_in_key(name: str, line: str, **look: Any) -> Line2D:
    """An entry of a figure's key for a mark that is drawn on top of bars or layers."""
    return Line2D([], [], color=MARK, linestyle=line, label=name, path_effects=WHITE_EDGE, **look)


def set_up(axes: Any, **settings: Any) -> None:
    """In our figures: `Axes.set`, with plain numbers on logarithmic scales."""
    axes.set(**settings)
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            low, high = axis.get_view_interval()
            subs = (1, 2, 5) if high < 1e4 * low else (1,)
            axis.set_major_locator(LogLocator(subs=subs))
            axis.set_major_formatter("{x:,g}")
            axis.set_minor_locator(NullLocator())


# --- words ----------------------------------------------------------------------------------------


def text_width(text: str, size: float = 10) -> float:
    """How wide a text is in a figure, in points."""
    if not text.strip():
        return 0.0  # blanks have no outline
    return TextPath((0, 0), text, size=size).get_extents().width


def readable_on(color: Any) -> str:
    """The ink of a figure, dark or white, whichever is easier to read on this colour."""
    # The eye sees green as brighter than red, and red as brighter than blue (ITU-R BT.601).
    red, green, blue = to_rgb(color)
    return MARK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "#ffffff"


def name_at_right(axes: Any, names: Sequence[tuple[str, tuple[float, float], str]]) -> None:
    """Write (name, place, colour) to the right of a figure, a thin line from each to its place.

    The names are in the order of their places, and a line of text apart at least. Set the limits of
    the axes before.
    """
    # To ask for the limits makes them up to date; to set them keeps them.
    axes.set(xlim=axes.get_xlim(), ylim=axes.get_ylim())
    to_axes = axes.transData + axes.transAxes.inverted()
    gap = 12.5 / POINTS / (0.7 * axes.figure.get_figheight())
    gap *= axes.get_subplotspec().get_gridspec().nrows
    placed = [(name, to_axes.transform(place).clip(0, 1), color) for name, place, color in names]
    placed.sort(key=lambda each: each[1][1])
    heights: list[float] = []
    for _, place, _ in placed:
        height = place[1]
        if heights:
            height = max(height, heights[-1] + gap)
        heights.append(height)
    # What was pushed above the top goes down again, as far as its neighbours need.
    top = 1.0
    for number in reversed(range(len(heights))):
        heights[number] = min(heights[number], top)
        top = heights[number] - gap
    for (name, place, color), height in zip(placed, heights, strict=True):
        axes.annotate(
            name,
            place,
            xycoords="axes fraction",
            xytext=(1.02, height),
            textcoords="axes fraction",
            va="center",
            fontsize=9.5,
            color=color,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.7, "relpos": (0, 0.5)},
        )
