"""Rows of a ladder, of any kind: kept in a file after every row, shown as a table.

class Ladder(Rows):                a kind of ladder says with `table` what its rows look like
ladder                             a table in Jupyter, text in a terminal
ladder["baseline"]                 one row
ladder.path                        the JSON file: machine, versions, date, commit, facts, rows
"""

from __future__ import annotations

import datetime
import html
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from recipes_lib.core.measure.machine import provenance, runs_dir


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
        self._check_new(row.name)
        if not self.rows:  # a run that never gets a row leaves the file of the last one alone
            self._put_last_run_aside()
        self.rows.append(row)
        self.save()
        return row

    def note(self, **facts: Any) -> None:
        """Keep other measured facts (held-out losses, counts) beside the rows."""
        self.facts |= facts
        self.save()

    def note_rates(self, rates: Mapping[torch.dtype, float]) -> None:
        """Keep the device's operations per second by dtype; the next `save` writes them."""
        # "float32": a JSON file knows no dtypes.
        named = {str(dtype).removeprefix("torch."): rate for dtype, rate in rates.items()}
        self.facts["rates"] = named

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
        lines = [_text_row(row, widths) for row in cells]
        header, *steps = lines
        rule = "-" * max(map(len, lines))
        text = [header, rule]
        for row, line in zip(self.rows, steps, strict=True):
            heading = self._heading(row)
            if heading:
                text.append(_text_heading(heading, len(rule)))
            text.append(line)
        return "\n".join(text)

    __repr__ = __str__  # what a terminal shows

    # What Jupyter shows, by this name.
    def _repr_html_(self) -> str:
        header, *steps = self.table()
        lines = [_html_row(header, tag="th")]
        for row, cells in zip(self.rows, steps, strict=True):
            heading = self._heading(row)
            if heading:
                lines.append(_html_heading(heading, columns=len(header)))
            lines.append(_html_row(cells, tag="td"))
        return f"<table>{''.join(lines)}</table>"

    def _heading(self, row: Any) -> str:
        """The name of the group that begins with this row; empty where none begins."""
        groups = [getattr(each, "group", "") for each in self.rows]
        position = self.rows.index(row)
        if position > 0 and groups[position] == groups[position - 1]:
            return ""
        return groups[position]

    def _check_new(self, name: str) -> None:
        if any(row.name == name for row in self.rows):
            raise ValueError(f"the ladder already has a row {name!r}: give this step another name")

    def _change(self, name: str, **values: Any) -> None:
        """Change values of one row, without saving. Raises KeyError if there is no such row."""
        old = self[name]
        self.rows[self.rows.index(old)] = replace(old, **values)

    def _put_last_run_aside(self) -> None:
        """An earlier run keeps its rows, in a file named after the time they were measured."""
        if self.path.exists():
            measured_at = datetime.datetime.fromtimestamp(self.path.stat().st_mtime)
            os.replace(self.path, self.path.with_suffix(f".{measured_at:%Y%m%d-%H%M%S}.json"))


# --- lines of a table -----------------------------------------------------------------------------


def _text_row(cells: list[str], widths: list[int]) -> str:
    """The name of a step reads from the left, numbers end at the right."""
    name, *values = cells
    padded = [name.ljust(widths[0])]
    padded += [value.rjust(width) for value, width in zip(values, widths[1:], strict=True)]
    return "  ".join(padded).rstrip()


def _text_heading(group: str, width: int) -> str:
    """A thin rule that begins with the name of the group."""
    return f"{group} ".ljust(width, "─")


def _html_row(cells: list[str], *, tag: str) -> str:
    # A step may be named "<b>".
    inside = [f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells]
    return f"<tr>{''.join(inside)}</tr>"


def _html_heading(group: str, *, columns: int) -> str:
    """A row with one cell across all columns."""
    cell = f'<th colspan="{columns}" style="text-align: left">{html.escape(group)}</th>'
    return f"<tr>{cell}</tr>"
