"""The table of a notebook: one row per step, predicted beside measured, saved after every row.

ladder = Ladder("01_large_models_limited_hardware")
ladder.add("baseline", measure(step, tokens=1024), predicted=plan.peak, loss=3.88)
ladder            # a table in Jupyter, text in a terminal
ladder.chart()    # a matplotlib figure
ladder.path       # the JSON file: machine, versions, date, commit, rows
"""

from __future__ import annotations

import datetime
import html
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from recipes_lib.core.machine import machine, provenance, runs_dir
from recipes_lib.core.measure import Measurement
from recipes_lib.report import charts
from recipes_lib.report.style import mib, percent

# --- the rows of any ladder: kept in a file, shown as a table -------------------------------------


class Rows:
    """Rows in the order of the steps, the first is the baseline.

    They are kept in `<folder>/<name>.json`, without a folder in `runs_dir()`. A kind of ladder says
    with `table` what its rows look like. Raises ValueError for a name that is no plain file name.
    """

    def __init__(self, name: str, *, folder: Path | None = None) -> None:
        if not name or Path(name).name != name:
            raise ValueError(f"name={name!r}: give a plain file name without a folder")
        if folder is None:
            folder = runs_dir()
        self.path = folder / f"{name}.json"
        self.rows: list[Any] = []
        self.facts: dict[str, Any] = {}

    def append(self, row: Any) -> Any:
        """Append a finished row, save the file and return the row.

        Raises ValueError for a name that is taken.
        """
        if any(other.name == row.name for other in self.rows):
            raise ValueError(
                f"the ladder already has a row {row.name!r}: give this step another name"
            )
        if not self.rows:  # a run that never gets a row leaves the file of the last one alone
            self._put_last_run_aside()
        self.rows.append(row)
        self.save()
        return row

    def note(self, **facts: Any) -> None:
        """Keep other measured facts (held-out losses, counts) beside the rows."""
        self.facts |= facts
        self.save()

    def save(self) -> None:
        """Write the file whole or not at all: a run that dies keeps the rows before."""
        content = {
            "ladder": self.path.stem,
            **provenance(),
            "facts": self.facts,
            "rows": [asdict(row) for row in self.rows],
        }
        scratch = self.path.with_suffix(".json.part")
        scratch.write_text(json.dumps(content, indent=1) + "\n")
        # A rename is one step: there is no moment at which the file is half written.
        os.replace(scratch, self.path)

    def table(self) -> list[list[str]]:
        """Header and rows as text cells."""
        raise NotImplementedError

    def __getitem__(self, name: str) -> Any:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"no row {name!r}; the ladder has {[row.name for row in self.rows]}")

    def __str__(self) -> str:
        cells = self.table()
        columns = zip(*cells, strict=True)
        widths = [max(map(len, column)) for column in columns]
        lines = []
        for name, *values in cells:
            # The name of a step reads from the left, numbers end at the right.
            padded = [name.ljust(widths[0])]
            padded += [value.rjust(width) for value, width in zip(values, widths[1:], strict=True)]
            lines.append("  ".join(padded).rstrip())
        header, *rows = lines
        rule = "-" * max(map(len, lines))
        return "\n".join([header, rule, *rows])

    __repr__ = __str__  # what a terminal shows

    # What Jupyter shows, by this name.
    def _repr_html_(self) -> str:
        header, *rows = self.table()
        lines = [_html_row(header, tag="th")]
        lines += [_html_row(row, tag="td") for row in rows]
        return f"<table>{''.join(lines)}</table>"

    def _replace(self, name: str, **values: Any) -> None:
        """Change values of one row, and save. Raises KeyError if there is no such row."""
        old = self[name]
        self.rows[self.rows.index(old)] = replace(old, **values)
        self.save()

    def _put_last_run_aside(self) -> None:
        """An earlier run keeps its rows, in a file named after the time they were measured."""
        if self.path.exists():
            measured_at = datetime.datetime.fromtimestamp(self.path.stat().st_mtime)
            os.replace(self.path, self.path.with_suffix(f".{measured_at:%Y%m%d-%H%M%S}.json"))


def _html_row(cells: list[str], *, tag: str) -> str:
    # A step may be named "<b>".
    inside = [f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells]
    return f"<tr>{''.join(inside)}</tr>"


# --- the ladder of bytes --------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One step: bytes, seconds and tokens per second as measured.

    `predicted_bytes` were computed before.
    """

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


class Ladder(Rows):
    """How many bytes and seconds each step takes."""

    def add(
        self, name: str, measured: Measurement, *, predicted: int, loss: float | None = None
    ) -> Row:
        """Append a row, save the file and return the row.

        Raises ValueError for a name that is taken.
        """
        row = Row(
            name=name,
            predicted_bytes=int(predicted),
            peak_bytes=measured.peak_bytes,
            seconds=measured.seconds,
            tokens_per_second=measured.tokens_per_second,
            loss=loss,
        )
        return self.append(row)

    def retime(self, name: str, seconds: float, *, tokens: int) -> None:
        """Give a row the time of steps on `tokens` that took turns with those of the other rows."""
        self._replace(name, seconds=seconds, tokens_per_second=tokens / seconds)

    def saved(self, name: str) -> float:
        """The part of the baseline's peak that a row saves: 0.85 means 85 % less."""
        return 1 - self[name].peak_bytes / self.rows[0].peak_bytes

    def line(self, name: str, *, timed: bool = True) -> str:
        """One row as a sentence: what was expected, what came, what it changed.

        Args:
            timed: with the seconds; leave them out where the row will be timed later.
        """
        row = self[name]
        sentence = f"{name}: expected {mib(row.predicted_bytes)}, measured {mib(row.peak_bytes)}"
        if row is not self.rows[0]:
            sentence += f" ({percent(-self.saved(name))} to the baseline)"
        if timed:
            sentence += f", {row.seconds:.2f} s per step"
        if row.loss is not None:
            sentence += f", loss {row.loss:.4f}"
        return sentence

    def table(self) -> list[list[str]]:
        """Header and rows as text cells; the Δ columns compare the measured peaks."""
        header = ["step", "predicted", "measured", "off by", "Δ previous", "Δ baseline"]
        header += ["s/step", "tokens/s", "loss"]
        cells = [header]
        for position, row in enumerate(self.rows):
            cells.append(self._cells(row, position))
        return cells

    def _cells(self, row: Row, position: int) -> list[str]:
        to_previous = ""
        to_baseline = ""
        if position > 0:  # the baseline has nothing to be compared with
            to_previous = percent(row.peak_bytes / self.rows[position - 1].peak_bytes - 1)
            to_baseline = percent(row.peak_bytes / self.rows[0].peak_bytes - 1)
        speed = ""
        if row.tokens_per_second:
            speed = f"{row.tokens_per_second:,.0f}"
        loss = ""
        if row.loss is not None:
            loss = f"{row.loss:.4f}"
        return [
            row.name,
            mib(row.predicted_bytes),
            mib(row.peak_bytes),
            f"{row.prediction_error:+.1%}",
            to_previous,
            to_baseline,
            f"{row.seconds:.2f}",
            speed,
            loss,
        ]

    def chart(self, *, title: str | None = None) -> Any:
        """Bars of the measured peaks with the predictions as ticks. Returns the figure."""
        rows = [asdict(row) for row in self.rows]
        return charts.chart(rows, title=title or machine().name)
