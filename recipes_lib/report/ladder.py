"""The table of a notebook: one row per step, predicted beside measured, saved after every row.

    ladder = Ladder("01_large_models_limited_hardware")
    ladder.add("baseline", measure(step, tokens=1024), predicted=plan.peak, loss=3.88)
    ladder            # a table in Jupyter, text in a terminal
    ladder.chart()    # a matplotlib figure
    ladder.path       # the JSON file: machine, versions, date, commit, rows

`show(fn)` prints the code that a notebook talks about, so that text and tests speak of the same lines.
"""

from __future__ import annotations

import ast
import datetime
import html
import inspect
import json
import os
import textwrap
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from recipes_lib.core.machine import machine, provenance, runs_dir
from recipes_lib.core.measure import Measurement

MIB = 2**20
BUDGET_COLORS = {
    "weights": "#9aa5b1",
    "states": "#2f6f9f",
    "gradients": "#d1495b",
    "activations": "#edae49",
    "loss": "#66a182",
}


@dataclass(frozen=True)
class Row:
    """One step: bytes, seconds and tokens per second as measured; `predicted_bytes` as computed before."""

    name: str
    predicted_bytes: int
    peak_bytes: int
    seconds: float
    tokens_per_second: float | None
    loss: float | None

    @property
    def prediction_error(self) -> float:
        """Relative, positive if the prediction was too high."""
        return self.predicted_bytes / self.peak_bytes - 1


class Ladder:
    """Rows in the order of the steps, the first is the baseline; kept in `<folder, or runs_dir()>/<name>.json`."""

    def __init__(self, name: str, *, folder: Path | None = None) -> None:
        if not name or Path(name).name != name:
            raise ValueError(f"name={name!r}: give a plain file name without a folder")
        self.path = (folder or runs_dir()) / f"{name}.json"
        self.rows: list[Row] = []
        self.facts: dict[str, Any] = {}

    def add(
        self, name: str, measured: Measurement, *, predicted: int, loss: float | None = None
    ) -> Row:
        """Append a row, save the file and return the row. Raises ValueError for a name that is taken."""
        tokens_per_second = measured.tokens_per_second
        return self.append(
            Row(
                name, int(predicted), measured.peak_bytes, measured.seconds, tokens_per_second, loss
            )
        )

    def append(self, row: Any) -> Any:
        """Append a finished row, of this or another kind, and save the file."""
        if any(other.name == row.name for other in self.rows):
            raise ValueError(
                f"the ladder already has a row {row.name!r}: give this step another name"
            )
        if (
            not self.rows and self.path.exists()
        ):  # an earlier run keeps its rows, under the time they were measured
            measured_at = datetime.datetime.fromtimestamp(self.path.stat().st_mtime)
            os.replace(self.path, self.path.with_suffix(f".{measured_at:%Y%m%d-%H%M%S}.json"))
        self.rows.append(row)
        self.save()
        return row

    def retime(self, name: str, seconds: float, *, tokens: int) -> None:
        """Give a row the time of steps that took turns with those of the other rows, and their tokens."""
        row = replace(self[name], seconds=seconds, tokens_per_second=tokens / seconds)
        self.rows[self.rows.index(self[name])] = row
        self.save()

    def note(self, **facts: Any) -> None:
        """Keep other measured facts (held-out losses, counts) beside the rows."""
        self.facts |= facts
        self.save()

    def save(self) -> None:
        """Write the file whole or not at all: a run that dies keeps the rows before."""
        rows = [asdict(row) for row in self.rows]
        content = {"ladder": self.path.stem, **provenance(), "facts": self.facts, "rows": rows}
        scratch = self.path.with_suffix(".json.part")
        scratch.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(scratch, self.path)

    def __getitem__(self, name: str) -> Row:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"no row {name!r}; the ladder has {[row.name for row in self.rows]}")

    def saved(self, name: str) -> float:
        """The part of the baseline's peak that a row saves: 0.85 means 85 % less."""
        return 1 - self[name].peak_bytes / self.rows[0].peak_bytes

    def line(self, name: str, *, timed: bool = True) -> str:
        """One row as a sentence: what was expected, what came, what it changed; not `timed`: without the seconds."""
        row = self[name]
        change = "" if row is self.rows[0] else f" ({percent(-self.saved(name))} to the baseline)"
        seconds = f", {row.seconds:.2f} s per step" if timed else ""
        loss = f", loss {row.loss:.4f}" if row.loss is not None else ""
        return (
            f"{name}: expected {row.predicted_bytes / MIB:,.0f} MiB, measured {row.peak_bytes / MIB:,.0f} MiB"
            f"{change}{seconds}{loss}"
        )

    def table(self) -> list[list[str]]:
        """Header and rows as text cells; the Δ columns compare the measured peaks."""
        header = [
            "step",
            "predicted",
            "measured",
            "off by",
            "Δ previous",
            "Δ baseline",
            "s/step",
            "tokens/s",
            "loss",
        ]
        cells = [header]
        for before, row in zip([None, *self.rows], self.rows, strict=False):
            first = self.rows[0]
            cells.append(
                [
                    row.name,
                    f"{row.predicted_bytes / MIB:,.0f} MiB",
                    f"{row.peak_bytes / MIB:,.0f} MiB",
                    f"{row.prediction_error:+.1%}",
                    percent(row.peak_bytes / before.peak_bytes - 1) if before else "",
                    percent(row.peak_bytes / first.peak_bytes - 1) if before else "",
                    f"{row.seconds:.2f}",
                    f"{row.tokens_per_second:,.0f}" if row.tokens_per_second else "",
                    f"{row.loss:.4f}" if row.loss is not None else "",
                ]
            )
        return cells

    def __str__(self) -> str:
        cells = self.table()
        widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
        lines = [
            "  ".join([r[0].ljust(widths[0]), *map(str.rjust, r[1:], widths[1:])]).rstrip()
            for r in cells
        ]
        return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def line(cells: list[str], tag: str) -> str:
            return (
                "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"
            )

        header, *rows = self.table()
        return f"<table>{line(header, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"

    def chart(self, *, title: str | None = None) -> Any:
        """Horizontal bars of the measured peaks with the predictions as ticks. Returns the figure."""
        return chart([asdict(row) for row in self.rows], title=title or machine().name)


def percent(change: float) -> str:
    """Signed and whole; what rounds to zero is never -0%."""
    return f"{round(change, 2) + 0.0:+.0%}"


def chart(rows: list[dict[str, Any]], *, title: str) -> Any:
    """Draw the rows of a ladder or of a recorded results file: peak memory left, time per step right."""
    figure, (memory, time) = blank_figure(
        rows, (9, 0.45 * len(rows) + 1.3), bars=True, ncols=2, width_ratios=(3, 1)
    )
    names = [row["name"] for row in rows]
    peaks, predicted = (
        [row[key] / MIB for row in rows] for key in ("peak_bytes", "predicted_bytes")
    )
    memory.barh(names, peaks, color=["#9aa5b1", *["#2f6f9f"] * (len(rows) - 1)], height=0.65)
    memory.plot(
        predicted,
        names,
        "|",
        color="#d1495b",
        markersize=15,
        markeredgewidth=2.5,
        label="predicted",
    )
    for y, peak in enumerate(peaks):
        share = f"  ({percent(peak / peaks[0] - 1)})" if y else ""
        memory.annotate(
            f"{peak:,.0f}{share}",
            (max(peak, predicted[y]), y),
            (6, 0),
            textcoords="offset points",
            va="center",
        )
    memory.set(xlabel="peak memory of tensors, MiB", xlim=(0, max(peaks) * 1.22))
    memory.legend(loc="lower right", frameon=False)
    seconds = [row["seconds"] for row in rows]
    time.barh(names, seconds, color="#c9d3dc", height=0.65)
    for y, value in enumerate(seconds):
        shown = f"{value:.2g}" if value < 10 else f"{value:.0f}"
        time.annotate(shown, (value, y), (4, 0), textcoords="offset points", va="center")
    time.set(xlabel="seconds per step", xlim=(0, max(seconds) * 1.25))
    figure.suptitle(title, fontsize=11)
    return figure


def budget_chart(budgets: dict[str, Any]) -> Any:
    """Draw predicted budgets as stacked bars, one per step: which term does each recipe shrink?"""
    figure, axes = blank_figure(budgets, (9, 0.4 * len(budgets) + 1.3), bars=True)
    left = [0.0] * len(budgets)
    for term, color in BUDGET_COLORS.items():
        sizes = [budget.at_peak()[term] / MIB for budget in budgets.values()]
        axes.barh(
            list(budgets), sizes, left=left, color=color, height=0.65, label=term.replace("_", " ")
        )
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    axes.set(xlabel="predicted bytes at the moment of the peak, MiB")
    axes.legend(loc="lower right", frameon=False)
    return figure


def loss_chart(curves: dict[str, list[tuple[int, float]]]) -> Any:
    """Draw curves of (optimizer step, held-out loss), one line per training run."""
    figure, axes = blank_figure([point for curve in curves.values() for point in curve], (7, 3))
    for name, curve in curves.items():
        axes.plot(*zip(*curve, strict=True), marker="o", label=name)
    axes.set(xlabel="optimizer step", ylabel="held-out loss, nats per token")
    axes.locator_params(axis="x", integer=True)
    axes.legend(
        frameon=False, loc="center left", bbox_to_anchor=(1, 0.5)
    )  # beside the curves, which go anywhere
    return figure


def change_chart(changes: dict[str, Any]) -> Any:
    """Draw `honest_evaluation.Comparison`s: each change with its interval, beside the line of no change."""
    figure, axes = blank_figure(changes, (7, 0.35 * len(changes) + 1), bars=True)
    for name, change in changes.items():
        reach = [[change.difference - change.low], [change.high - change.difference]]
        axes.errorbar(change.difference, name, xerr=reach, fmt="o", color="#2f6f9f", capsize=4)
    axes.axvline(0, color="#9aa5b1", linewidth=1)
    axes.set(
        xlabel="change of the held-out loss, nats per token (left of the line: better)",
        ymargin=0.15,
    )
    return figure


def blank_figure(
    content: Any, size: tuple[float, float], *, bars: bool = False, **options: Any
) -> tuple[Any, Any]:
    """A figure without frames and its axes, closed: a notebook shows what is returned, and would show it twice."""
    if not content:
        raise ValueError("there is nothing to draw: add a row or a point first")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=size, sharey=bars, layout="constrained", **options)
    plt.close(figure)
    for each in figure.axes:
        each.spines[["top", "right", *["left"] * bars]].set_visible(False)
        each.tick_params(axis="y", length=0 if bars else 3.5)
    if bars:  # the first row on top
        figure.axes[0].invert_yaxis()
    return figure, axes


def show(*functions: Any) -> None:
    """Print the source of functions as it is in the package, without their docstrings."""
    for function in functions:
        source = textwrap.dedent(inspect.getsource(function))
        definition, lines = ast.parse(source).body[0], source.splitlines()
        if ast.get_docstring(definition):
            del lines[definition.body[0].lineno - 1 : definition.body[0].end_lineno]
        print("\n".join(line for line in lines if line.strip()))
