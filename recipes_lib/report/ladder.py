"""The ladder: a table that grows by a row per step, kept in a file after every row.

    columns = [Column("peak_bytes", "peak", "B", mib), TIME, RATIO]
    ladder = Ladder("my_notebook", columns)
    ladder.climb("baseline", build)    # build() gives a turn; turn() takes a step, gives its times
    ladder.take_turns(rounds=5)        # the times of the rows that climbed, in turns
    ladder                             # a table in Jupyter, text in a terminal
    ladder["baseline"].seconds         # a number; .seconds_low and .seconds_high are its range

Times on a shared machine only ever get longer, so what counts is the fastest turn of a row; its
range stands beside it. A row is compared with the first one by the fastest turns of both, among the
rounds in which both took part, and the range takes in the ratios of these rounds. Where the slowest
turn took more than 1.5 times as long as the fastest, another program disturbed the machine: the
table and the file say so.

`ladders` has the five ladders of the notebooks: each names its columns, and says
what a row measures.
"""

from __future__ import annotations

import datetime
import html
import json
import os
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from recipes_lib.core.measure.provenance import provenance, runs_dir
from recipes_lib.core.measure.taking_turns import Turn, Turns
from recipes_lib.report.charts.bars import Bars, bars
from recipes_lib.report.style import FACTOR, three_digits

WIDTH = 88  # of a printed line, as in the code cells of a notebook
DISTURBED = 1.5  # the slowest turn over the fastest, from which on a row is marked


class Column(NamedTuple):
    """One number of a row: its name in the code and in the file, its heading, its unit.

    Without a heading it is recorded and not shown. `words` writes a value as text.
    """

    metric: str
    heading: str = ""
    unit: str = ""
    words: Callable[[Any], str] = str


TIME = Column("seconds", "s/step", "s", three_digits)
RATIO = Column("ratio", "time, ×", "×", FACTOR)


class Row(SimpleNamespace):
    """A named step and what was measured of it, by the names of the columns.

    A column that nobody measured is None. The range of a number stands beside it: `seconds_low`.
    """

    def set_range(self, metric: str, value: float, low: float, high: float) -> None:
        """A number of a row with its range."""
        vars(self).update({metric: value, f"{metric}_low": low, f"{metric}_high": high})

    def _ipython_display_(self) -> None:
        """Nothing: `climb` has printed what there is to say."""


class Ladder:
    """Rows in the order of the steps, kept in `runs/<name>.json`.

    A kind of ladder says with `columns` what a row has, with `derive` what follows from it, and
    with the attributes below how rows are compared.
    """

    columns: Sequence[Column] = (TIME, RATIO)
    clock = "seconds"  # the time by which rows are compared
    in_groups = False  # each group has a first row of its own
    timed: Collection[str] = ()  # what a line leaves out until a row took turns
    as_fast = False  # the ratio says how many times as fast, and not how many times as long

    def __init__(self, name: str, columns: Sequence[Column] = ()) -> None:
        self.path = runs_dir() / f"{name}.json"
        self.rows: list[Row] = []
        self.facts: dict[str, Any] = {}
        if columns:
            self.columns = columns
        self._turns = Turns()

    # --- add rows ---

    def climb(
        self,
        name: str,
        build: Callable[[], Turn],
        *,
        look: Callable[[Any], Mapping[str, Any]] | None = None,
        expected: str = "",
        kept: int = 0,
        peak: int = 0,
        group: str = "",
        in_turns: bool = True,
        **known: Any,
    ) -> Row:
        """Say what is expected, build a turn, look at it, and add the row.

        The turn stays alive until `take_turns`, as long as there is room for it.

        Args:
            build: gives the turn: a function that takes a step and gives its times by metric.
            look: takes the turn and gives what is measured of it once; by default one turn.
            expected: printed before anything runs.
            kept, peak: bytes while it waits, and while it runs.
            group: the heading above this row.
            in_turns: False for a row whose time would mislead: it gets none.
            known: further numbers of the row.
        Raises ValueError for a name that is taken.
        """
        self._check_new(name)
        print(_wrapped_line(f"{name}: {expected}").removeprefix("  "))
        self._turns.make_room(peak)
        turn = build()
        if look is None:
            measured = turn()
        else:
            measured = look(turn)
        row = Row(name=name, group=group, **known, **measured)
        if in_turns:
            self._turns.wait(name, turn, build, kept=kept, peak=peak)
        else:
            setattr(row, self.clock, None)
        self.append(row)
        print(_wrapped_line(self.line(name).removeprefix(f"{name}: ")))
        return row

    def append(self, row: Row) -> Row:
        """Add a finished row to the ladder, and save. ValueError for a name that is taken."""
        self._check_new(row.name)
        if not self.rows:  # a run that never gets a row leaves the file of the last one alone
            self._put_last_run_aside()
        row.turns = 0
        unmeasured = dict.fromkeys(column.metric for column in self.columns)
        vars(row).update(unmeasured | {"group": "", "disturbed": None} | vars(row))
        self.rows.append(row)
        first = self.first_of(row)
        if getattr(row, self.clock, None):  # a first impression, until the rows take turns
            self.compare(row, "ratio", first.name)
        self.derive(row, first)
        self.save()
        return row

    def derive(self, row: Row, first: Row) -> None:
        """Set what follows from the other numbers of a row. `first` is what it is compared with."""

    def first_of(self, row: Row) -> Row:
        """The row that this one is compared with: the first one, or the first of its group."""
        if not self.in_groups:
            return self.rows[0]
        return next(each for each in self.rows if each.group == row.group)

    def _check_new(self, name: str) -> None:
        if any(row.name == name for row in self.rows):
            raise ValueError(f"the ladder already has a row {name!r}: give this step another name")

    # --- times in turns ---

    def take_turns(self, rounds: int = 5) -> None:
        """Time the rows that climbed since the last turns, all in turns, there and back.

        What slows the machine for a while then slows all of them. The first row takes part again.
        Rows that do not fit into memory together take their turns in parts, with the first row in
        each. One that fails keeps its first time. The file is saved after every round; the models
        are free afterwards. Raises ValueError if no row waits for its turns.
        """
        waiting = [row for row in self.rows if row.name in self._turns.waiting and not row.turns]
        if not waiting:
            raise ValueError("no row can take turns: add rows with climb, which knows their builds")
        for first in {self.first_of(row).name: None for row in waiting}:
            names = [row.name for row in waiting if self.first_of(row).name == first]
            for part in self._turns.that_fit_together(first, names):
                print(textwrap.shorten(f"in turns: {', '.join(part)}", WIDTH, placeholder=" …"))
                self._take_turns_together(part, rounds)
            for name in names:
                if name != first:
                    del self._turns.waiting[name]  # what builds a row may hold its model

    def _take_turns_together(self, names: Sequence[str], rounds: int) -> None:
        for took in self._turns.take(names, rounds):
            self._set_times(took)

    def set_times(self, seconds: Mapping[str, Sequence[float]]) -> None:
        """Give the rows times that were taken elsewhere: for each row, those of every round."""
        for took in zip(*seconds.values(), strict=True):
            times = [{self.clock: each} for each in took]
            self._turns.rounds.append(dict(zip(seconds, times)))
        self._set_times(seconds)

    def _set_times(self, names: Collection[str]) -> None:
        """Give these rows the fastest and the slowest of their turns so far, and save."""
        for name in names:
            row = self[name]
            turns = [took[name] for took in self._turns.rounds if name in took]
            row.turns = len(turns)
            for metric in turns[0]:
                each = [turn[metric] for turn in turns]
                row.set_range(metric, min(each), min(each), max(each))
            disturbed = getattr(row, f"{self.clock}_high") / getattr(row, self.clock)
            row.disturbed = disturbed if disturbed > DISTURBED else None
        for row in self.rows:  # a faster turn of the first row changes the ratios of all others
            first = self.first_of(row)
            if row.turns and (row.name in names or first.name in names):
                self.compare(row, "ratio", first.name)
                self.derive(row, first)
        self.save()

    def compare(self, row: Row, metric: str, other: str) -> None:
        """Set the ratio of a row to another one: of the fastest turns of both.

        Only the rounds in which both took part count: another hour may be a slower one. The range
        takes in the ratios of these rounds. Without any, first impressions are compared.
        """
        both = [took for took in self._turns.rounds if {row.name, other} <= took.keys()]
        if not both:
            ratio = self._ratio(getattr(row, self.clock), getattr(self[other], self.clock))
            setattr(row, metric, ratio)
            return
        mine = [took[row.name][self.clock] for took in both]
        theirs = [took[other][self.clock] for took in both]
        ratio = self._ratio(min(mine), min(theirs))
        if row.name == other:  # beside its own fastest turn the range shows the noise
            theirs = [min(mine)] * len(mine)
        each = [self._ratio(*took) for took in zip(mine, theirs)]
        row.set_range(metric, ratio, min([ratio, *each]), max([ratio, *each]))

    def _ratio(self, mine: float, theirs: float) -> float:
        return theirs / mine if self.as_fast else mine / theirs

    # --- the file ---

    def note(self, **facts: Any) -> None:
        """Keep other measured facts (held-out losses, counts) beside the rows."""
        self.facts |= facts
        self.save()

    def save(self) -> None:
        """Write the ladder's file whole or not at all: a run that dies keeps the rows before."""
        content = {"ladder": self.path.stem, **provenance(), "facts": self.facts}
        content["rows"] = list(self.records())
        scratch = self.path.with_suffix(".json.part")
        scratch.write_text(json.dumps(content, indent=1) + "\n")
        # A rename is one step: there is no moment at which the file is half written.
        os.replace(scratch, self.path)

    def records(self) -> Iterator[dict[str, Any]]:
        """Each value of each row of the ladder as a flat record, with its range and its unit."""
        units = {column.metric: column.unit for column in self.columns}
        for row in self.rows:
            for metric, value in vars(row).items():
                end = metric.endswith(("_low", "_high"))
                if metric == "name" or end or value is None or value == "":
                    continue
                low, high = ranges_of(row, metric)
                values = {metric: value}
                if isinstance(value, dict):
                    values = {f"{metric} · {key}": each for key, each in value.items()}
                for name, each in values.items():
                    record = {"notebook": self.path.stem, "row": row.name, "metric": name}
                    record |= {"value": each, "unit": units.get(metric, "")}
                    if low is not None:
                        record |= {"low": low, "high": high}
                    yield record

    def _put_last_run_aside(self) -> None:
        """An earlier run of a ladder keeps its rows, in a file named after their time."""
        if self.path.exists():
            measured_at = datetime.datetime.fromtimestamp(self.path.stat().st_mtime)
            os.replace(self.path, self.path.with_suffix(f".{measured_at:%Y%m%d-%H%M%S}.json"))

    # --- what it shows ---

    def __getitem__(self, name: str) -> Row:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"no row {name!r}; the ladder has {[row.name for row in self.rows]}")

    def line(self, name: str) -> str:
        """One row of the ladder as a sentence."""
        row = self[name]
        left_out = () if row.turns else self.timed
        shown = [each for each in self.columns if each.heading and each.metric not in left_out]
        parts = [f"{each.heading} {cell(row, each)}" for each in shown if cell(row, each)]
        return f"{name}: {', '.join(parts)}"

    def table(self) -> list[list[str]]:
        """The ladder as header and rows of text cells. A column without any entry is left out."""
        header = ["step"]
        cells = [[named(row)] for row in self.rows]
        for column in self.columns:
            texts = [cell(row, column) for row in self.rows]
            if column.heading and any(texts):
                header.append(column.heading)
                for line, text in zip(cells, texts, strict=True):
                    line.append(text)
        return [header, *cells]

    def draw(self, *columns: Bars, **options: Any) -> Any:
        """Bars with the names and groups of the ladder's rows."""
        groups = [row.group for row in self.rows]
        return bars([row.name for row in self.rows], *columns, groups=groups, **options)

    def __str__(self) -> str:
        """The ladder as a table of text."""
        header, *cells = self.table()
        columns = zip(header, *cells, strict=True)
        widths = [max(map(len, column)) for column in columns]
        lines = [_text_row(header, widths)]
        for line, heading in self._lines_with_groups(cells):
            if heading:
                lines.append(heading)
            lines.append(_text_row(line, widths))
        return "\n".join(lines)

    __repr__ = __str__  # what a terminal shows

    # What Jupyter shows, by this name.
    def _repr_html_(self) -> str:
        """The ladder as a table for Jupyter."""
        header, *cells = self.table()
        lines = [_html_row(header, "th")]
        for line, heading in self._lines_with_groups(cells):
            if heading:
                span = f'<th colspan="{len(header)}" style="text-align: left">'
                lines.append(f"<tr>{span}{html.escape(heading)}</th></tr>")
            lines.append(_html_row(line, "td"))
        return f"<table>{''.join(lines)}</table>"

    def _lines_with_groups(self, cells: Sequence[list[str]]) -> Iterator[tuple[list[str], str]]:
        """Each line of the ladder's table, with the name of the group that begins there, or ""."""
        before = ""
        for line, row in zip(cells, self.rows, strict=True):
            begins = row.group if row.group != before else ""
            before = row.group
            yield line, begins or ""


def cell(row: Row, column: Column) -> str:
    """A value of a ladder as text, with both ends of a range: "1.02 (0.97–1.08)"."""
    value = getattr(row, column.metric)
    if value is None:
        return ""
    text = column.words(value)
    ends = ranges_of(row, column.metric)
    if None in ends:
        return text
    low, high = map(column.words, ends)
    if low == high:
        return text
    return f"{text} ({low}–{high})"


def ranges_of(row: Any, metric: str) -> tuple[float | None, float | None]:
    """The lowest and the highest of a row's turns on the ladder; None without turns."""
    return getattr(row, f"{metric}_low", None), getattr(row, f"{metric}_high", None)


def same_to(difference: float) -> str:
    """ "to 3e-08", or "to the last bit"."""
    if difference == 0:
        return "to the last bit"
    return f"to {difference:.0e}"


def named(row: Row) -> str:
    """The name of a row, which says if its turns are not to be trusted."""
    if row.disturbed:
        return f"{row.name} (disturbed: a turn took {row.disturbed:.1f}×)"
    return row.name


def _wrapped_line(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="  ")


def _text_row(cells: Sequence[str], widths: Sequence[int]) -> str:
    """A row of the ladder as text: the name to the left, numbers to the right."""
    name, *numbers = cells
    parts = [name.ljust(widths[0])]
    parts += [text.rjust(width) for text, width in zip(numbers, widths[1:], strict=True)]
    return "  ".join(parts)


def _html_row(cells: Sequence[str], tag: str) -> str:
    inside = [f"<{tag}>{html.escape(text)}</{tag}>" for text in cells]  # a step may be named "<b>"
    return f"<tr>{''.join(inside)}</tr>"
