"""A figure with its message on top and its source at the bottom, as wide as a page.

    @page()
    def my_chart(sizes, *, title):
        figure, axes = blank_figure(sizes, (WIDTH, 3), title=title, source="measured on …")
        axes.plot(sizes, color=RECIPE)
        return figure

A cell of a notebook that returns it shows it: 200 dots per inch, at the width of 100 per inch.
"""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.offsetbox import AnnotationBbox, DrawingArea, HPacker, TextArea
from matplotlib.patches import Rectangle

from recipes_lib.report.labels import POINTS, text_width, wrap
from recipes_lib.report.style import DARK, LIGHT, measured_here

DPI = 200  # two dots per point of a screen: sharp on every display
CSS_DOTS = 100  # dots per inch of a page: 8.4 inches are 840 of them, the width of GitHub's
WIDTH = 8.4  # inches of a chart
EDGE = 0.16  # inches of paper on each side
LINE = 1.35  # the height of a line of text, in sizes of its font

TITLE_SIZE = 13
KEY_SIZE = 9.5
SOURCE_SIZE = 8.5


# --- the page -------------------------------------------------------------------------------------


@contextlib.contextmanager
def page(*, dark: bool = False) -> Iterator[None]:
    """Whatever is drawn inside has the look of a light or of a dark page.

    Also as a decorator: `@page()` above a function that draws.
    """
    colors = DARK if dark else LIGHT
    look = {
        "figure.dpi": DPI,
        "figure.facecolor": colors["paper"],
        "axes.facecolor": "none",
        "axes.edgecolor": colors["muted"],
        "axes.labelcolor": colors["muted"],
        "axes.titlecolor": colors["ink"],
        "axes.titlelocation": "left",
        "axes.titlesize": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "font.size": 10,
        "grid.color": colors["faint"],
        "text.color": colors["ink"],
        "xtick.color": colors["muted"],
        "ytick.color": colors["muted"],
    }
    with mpl.rc_context(look):
        yield


def ink() -> str:
    """The colour of text and of predictions on this page."""
    return mpl.rcParams["text.color"]


def muted() -> str:
    """The colour of what is read second: headings of axes, sources, remarks."""
    return mpl.rcParams["axes.labelcolor"]


def faint() -> str:
    """The colour of rules and shades."""
    return mpl.rcParams["grid.color"]


def blank_figure(
    content: Collection[Any],
    size: tuple[float, float],
    *,
    title: str | None = None,
    source: str | None = "",
    key: Collection[Key] = (),
    bars: bool = False,
    larger: float = 1.0,
    **options: Any,
) -> tuple[Any, Any]:
    """A figure whose axes take `size` inches, with its title, key and source around them.

    Args:
        content: what will be drawn; only looked at to refuse a chart of nothing.
        title: the message, in one sentence.
        source: where the numbers are from, at the bottom. None: measured on this machine, today.
        key: what colours and marks mean, below the title.
        larger: how much larger title, key and source are, for a picture that is shown small.
        bars: the chart has horizontal bars with names: no left frame, and the first name on top.
        options: of `Figure.subplots`, for instance `ncols`.
    Raises ValueError if there is nothing to draw.
    """
    if not content:
        raise ValueError("there is nothing to draw: add a row or a point first")
    if source is None:
        source = measured_here()
    figure = Chart(size, title=title, source=source, key=key, larger=larger)
    axes = figure.subplots(sharey=bars, **options)
    for each in figure.axes:
        if bars:
            each.spines["left"].set_visible(False)
            each.tick_params(axis="y", length=0, labelcolor=ink())
    if bars:
        figure.axes[0].invert_yaxis()  # the axes share it: once turns all of them
    return figure, axes


# --- the figure -----------------------------------------------------------------------------------


class Key(NamedTuple):
    """One entry of the key: what a colour, a tick or a whisker means."""

    name: str
    color: str
    mark: str = "square"  # or "tick", "whisker", "dashes", or the one letter that is explained


class Chart(Figure):
    """A figure of `size` inches of axes, below a title and a key, above a source."""

    def __init__(
        self,
        size: tuple[float, float],
        *,
        title: str | None = None,
        source: str = "",
        key: Collection[Key] = (),
        larger: float = 1.0,
    ) -> None:
        width, height = size
        title_size = larger * TITLE_SIZE
        key_size = larger * KEY_SIZE
        source_size = larger * SOURCE_SIZE
        room = (width - 2 * EDGE) * POINTS
        title_lines = wrap(title or "", room, size=title_size, bold=True)
        key_lines = _lines_of_key(list(key), room, size=key_size)
        source_lines = wrap(source, room, size=source_size)
        above = EDGE + _inches(title_lines, title_size) + _inches(key_lines, key_size, 1.6)
        below = EDGE + _inches(source_lines, source_size)
        total = height + above + below
        super().__init__(figsize=(width, total), layout="constrained")
        sides = EDGE / width
        self.get_layout_engine().set(
            rect=(sides, below / total, 1 - 2 * sides, height / total), w_pad=0.06, h_pad=0.06
        )
        self.message = title or ""
        self._write_title(title_lines, title_size)
        self._draw_key(key_lines, key_size, down=EDGE + _inches(title_lines, title_size, 1.45))
        self._write_source(source_lines, source_size)

    def _write_title(self, lines: list[str], size: float) -> None:
        text = self.text(
            *self._from_top_left(EDGE),
            "\n".join(lines),
            fontsize=size,
            fontweight="bold",
            va="top",
            linespacing=1.2,
        )
        text.set_in_layout(False)  # its place is kept free already

    def _draw_key(self, lines: list[list[Key]], size: float, *, down: float) -> None:
        for number, line in enumerate(lines):
            parts = [_drawn_entry(entry, size) for entry in line]
            row = HPacker(children=parts, align="center", pad=0, sep=1.3 * size)
            box = AnnotationBbox(
                row,
                self._from_top_left(down + number * 1.6 * size / POINTS),
                xycoords="figure fraction",
                box_alignment=(0, 1),
                frameon=False,
                pad=0,
            )
            box.set_in_layout(False)
            self.add_artist(box)

    def _write_source(self, lines: list[str], size: float) -> None:
        width, height = self.get_size_inches()
        text = self.text(
            EDGE / width,
            0.7 * EDGE / height,
            "\n".join(lines),
            fontsize=size,
            color=muted(),
            va="bottom",
        )
        text.set_in_layout(False)

    def _from_top_left(self, down: float) -> tuple[float, float]:
        """The place `down` inches below the top, at the left edge, as parts of the figure."""
        width, height = self.get_size_inches()
        return EDGE / width, 1 - down / height

    # What Jupyter shows, by this name. The words are for those who cannot see the picture.
    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, str], dict[str, Any]]:
        picture = io.BytesIO()
        self.savefig(picture, format="png", dpi=self.dpi)
        width = round(self.get_size_inches()[0] * CSS_DOTS)
        data = {
            "image/png": base64.b64encode(picture.getvalue()).decode(),
            "text/plain": self.message or "a chart",
        }
        # The width alone: a narrower page then scales the height with it.
        return data, {"image/png": {"width": width}}


# --- the key --------------------------------------------------------------------------------------


def _inches(lines: list[Any], size: float, line: float = LINE) -> float:
    return len(lines) * line * size / POINTS


def _lines_of_key(entries: list[Key], room: float, *, size: float) -> list[list[Key]]:
    lines: list[list[Key]] = []
    used = 0.0
    for entry in entries:
        width = text_width(entry.name, size=size) + 2.9 * size
        if not lines or used + width > room:
            lines.append([])
            used = 0.0
        lines[-1].append(entry)
        used += width
    return lines


def _drawn_entry(entry: Key, size: float) -> HPacker:
    if len(entry.mark) == 1:
        mark = TextArea(entry.mark, textprops={"fontsize": size, "color": entry.color})
    else:
        mark = DrawingArea(_mark_width(entry, size), size)
        for part in _marks(entry, size):
            mark.add_artist(part)
    name = TextArea(entry.name, textprops={"fontsize": size, "color": ink()})
    return HPacker(children=[mark, name], align="center", pad=0, sep=0.5 * size)


def _mark_width(entry: Key, size: float) -> float:
    if entry.mark == "tick":
        return 0.4 * size
    if entry.mark == "dashes":
        return 2.2 * size
    return 1.1 * size


def _marks(entry: Key, size: float) -> list[Any]:
    """What stands before a name of the key, in a box of `size` points."""
    middle = size / 2
    width = _mark_width(entry, size)
    if entry.mark == "tick":
        return [Line2D([width / 2, width / 2], [0, size], color=entry.color, linewidth=2.2)]
    if entry.mark == "whisker":
        ends = {"marker": "|", "markersize": 6}
        return [Line2D([0, size], [middle, middle], color=entry.color, linewidth=1.2, **ends)]
    if entry.mark == "dashes":
        line = {"linestyle": "--", "linewidth": 1.2}
        return [Line2D([0, width], [middle, middle], color=entry.color, **line)]
    return [Rectangle((0, 0), size, size, facecolor=entry.color, linewidth=0)]
