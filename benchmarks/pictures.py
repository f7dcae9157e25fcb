"""The README's picture: the ladder of notebook 01, on a light and on a dark page.

python -m benchmarks.pictures      write docs/ladder-01.png and docs/ladder-01-dark.png

It is drawn from the newest recorded run, and narrow: a phone shows it at half its width, and its
words stay legible.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import LADDERS, RESULTS, newest, plain_name
from recipes_lib.report.bars import Slots
from recipes_lib.report.charts import SAME, draw_peaks, time_ratio
from recipes_lib.report.figure import Key, blank_figure, ink, muted, page
from recipes_lib.report.style import Unit, measured_on

DOCS = Path(__file__).resolve().parents[1] / "docs"
PICTURES = {"ladder-01.png": False, "ladder-01-dark.png": True}  # by name: is its page dark?

WIDTH = 7.0  # inches
LARGER = 1.2  # than the letters of a chart in a notebook
LETTERS = 11.5
# The right edge of the times, in widths of the axes. The longest label of a bar ends with them, so
# what is beyond 1 has to take "0.66×" and a gap that nobody reads over.
EDGE = 1.25
IN_POINTS = {"xycoords": "axes fraction", "textcoords": "offset points"}


def draw(folder: Path = DOCS) -> list[Path]:
    """Write the pictures, and return their paths; nothing if no run was recorded."""
    run = newest(LADDERS["01"], "cpu", folder=RESULTS)
    if run is None:
        return []
    folder.mkdir(exist_ok=True)
    written = []
    for name, dark in PICTURES.items():
        with page(dark=dark):
            figure = ladder_picture(run)
        figure.savefig(folder / name)
        written.append(folder / name)
    return written


def ladder_picture(run: dict[str, Any]) -> Any:
    """Bars of the peaks with predictions as ticks; change and time of each row as text."""
    rows = [row | {"name": plain_name(row["name"])} for row in run["rows"]]
    slots = Slots(rows, size=LETTERS)
    figure, axes = blank_figure(
        rows,
        (WIDTH, slots.inches + 0.4),
        title=message(rows),
        source=measured_on(run) + _remark(rows),
        key=[Key("predicted before the run", ink(), "tick")],
        larger=LARGER,
        bars=True,
    )
    slots.write_names(axes)
    # Narrow as it is, it has no room for brackets around the change.
    draw_peaks(axes, rows, slots, change="{}", size=LETTERS)
    _write_times(axes, rows, slots)
    return figure


def message(rows: Sequence[dict[str, Any]]) -> str:
    """From the baseline's peak to that of all recipes together."""
    first = rows[0]["peak_bytes"]
    last = rows[-1]["peak_bytes"]
    unit = Unit(first)
    return f"One training step, recipe by recipe: {unit.number(first)} → {unit.text(last)}"


def _remark(rows: Sequence[dict[str, Any]]) -> str:
    if any(time_ratio(row, rows[0]) == SAME for row in rows):
        return f"; {SAME} where turns do not differ"
    return ""


def _write_times(axes: Any, rows: Sequence[dict[str, Any]], slots: Slots) -> None:
    """A column at the right edge: the time of each row over the baseline's."""
    column = {"fontsize": LETTERS, "ha": "right", "annotation_clip": False}
    axes.annotate("time", (EDGE, 1), (0, 6), color=muted(), **column, **IN_POINTS)
    for row, place in zip(rows, slots.places, strict=True):
        text = time_ratio(row, rows[0]) or "1×"
        where = {"xycoords": ("axes fraction", "data"), "va": "center"}
        axes.annotate(text, (EDGE, place), **column, **where)


if __name__ == "__main__":
    for written in draw():
        print(written)
