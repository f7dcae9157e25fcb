"""The ladder of a notebook about devices: how good, how large and how fast each file is.

ladder = EdgeLadder("06_training_for_edge_devices")
ladder.climb("teacher", run, file=path, accuracy=0.98, group="digits")
ladder.climb("student", run, file=other, accuracy=0.97, predicted_bytes=480_000, group="digits")
ladder.take_turns(rounds=5)                  # times all of them again, in turns
ladder                                       # a table in Jupyter, text in a terminal
ladder.chart("digits")                       # a matplotlib figure of one group

Each group is one task with its own first row, with which the others are compared. A row that is one
link more than an earlier one is compared with that one as well: `after="student"`. Its quality is
an accuracy (higher is better), a perplexity (lower is better), or how often the likeliest answer is
that of the first row, where the model itself is of no use yet.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes_lib.core.checks import check_choice, check_number, check_share, check_whole
from recipes_lib.core.measure import there_and_back, timed
from recipes_lib.report.edge_ladder_text import HEADER, cells, what_came, what_is_expected
from recipes_lib.report.ladder_text import wrapped
from recipes_lib.report.rows import Rows
from recipes_lib.report.size_error_chart import SizeError, size_error_chart
from recipes_lib.report.turns import announce, ratio_and_range

SHORTEST = 0.05  # seconds: a shorter look at the clock says little, so the call is repeated
MOST_CALLS = 1000


@dataclass(frozen=True)
class EdgeRow:
    """One model in one file: its quality, its bytes, and the time that it takes.

    `seconds` is the median over the turns, for one image or one token, `seconds_low` the fastest
    turn and `seconds_high` the slowest (None before the turns). `ratio` is the time over that of
    the first row of the group in the same round, with its range. `after` is the name of an
    earlier row that this one changes in one thing, and `after_ratio` the time over that row's; both
    are None without one. `load_seconds` and `peak_bytes` (what loading it and running it once adds
    to the memory of a process) are None where they were not measured.
    """

    name: str
    group: str
    file_bytes: int
    seconds: float
    accuracy: float | None = None
    perplexity: float | None = None
    agreement: float | None = None
    predicted_bytes: int | None = None
    load_seconds: float | None = None
    peak_bytes: int | None = None
    note: str = ""
    turns: int = 0
    seconds_low: float | None = None
    seconds_high: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    after: str | None = None
    after_ratio: float | None = None
    after_low: float | None = None
    after_high: float | None = None


class EdgeLadder(Rows):
    """Quality, size and time of one file per row, compared with the first row of its group."""

    def __init__(self, name: str, *, folder: Path | None = None) -> None:
        super().__init__(name, folder=folder)
        self._runs: dict[str, tuple[Callable[[], Any], int]] = {}

    # --- add a row ---

    def climb(
        self,
        name: str,
        run: Callable[[], Any],
        *,
        file: str | Path,
        accuracy: float | None = None,
        perplexity: float | None = None,
        agreement: float | None = None,
        predicted_bytes: int | None = None,
        load_seconds: float | None = None,
        peak_bytes: int | None = None,
        units: int = 1,
        group: str = "",
        after: str | None = None,
        note: str = "",
    ) -> None:
        """Say what the arithmetic expects, time a call, and add the row.

        Args:
            run: takes `units` images or tokens through the model; called again by `take_turns`.
            file: what is copied to the device.
            accuracy: share of right answers, 0 to 1; or else
            perplexity: on held-out text; or else
            agreement: share of places where the likeliest answer is that of the first row, 0 to 1.
                A row has one of the three, the same in its whole group.
            predicted_bytes: of the file, if there is a formula.
            load_seconds: from the file to a model that is ready.
            peak_bytes: what the model adds to the memory of a process.
            group: the heading above this row, and the task that it belongs to.
            after: the name of a row that this one changes in one thing; what is said of it in a few
                words compares it with that one instead of the first.
            note: a remark that is kept with the row.
        Raises ValueError for a name that is taken, for a row `after` that is not there, for several
        qualities or none, for a quality of another kind than the group's, and for a file that does
        not exist.
        """
        self._check_new(name)
        check_whole(units=units)
        if after is not None:
            check_choice([row.name for row in self.rows], after=after)
        self._check_quality(group, accuracy=accuracy, perplexity=perplexity, agreement=agreement)
        if not os.path.isfile(file):
            raise ValueError(f"file={str(file)!r}: give the path of a file that was written")
        if predicted_bytes is not None:
            print(f"{name}: {what_is_expected(predicted_bytes)}")
        else:
            print(f"{name}:")
        run()  # the first call makes buffers
        row = EdgeRow(
            name=name,
            group=group,
            file_bytes=os.path.getsize(file),
            seconds=_seconds_per_unit(run, units),
            accuracy=accuracy,
            perplexity=perplexity,
            agreement=agreement,
            predicted_bytes=predicted_bytes,
            load_seconds=load_seconds,
            peak_bytes=peak_bytes,
            note=note,
            after=after,
        )
        self.append(row)
        self._runs[name] = (run, units)
        print(wrapped(what_came(row, first=self.first_of(group))))

    # --- time in turns ---

    def take_turns(self, rounds: int = 5) -> None:
        """Time all rows again, there and back, and compare them round by round within each group.

        The file is saved at the end. Raises ValueError for less than one round, and if no row has
        climbed.
        """
        check_whole(rounds=rounds)
        if not self._runs:
            raise ValueError("no row can take turns: add rows with climb, which knows their runs")
        announce(list(self._runs))
        turns: list[dict[str, float]] = []
        for names in there_and_back(list(self._runs), rounds=rounds):
            turns.append({name: _seconds_per_unit(*self._runs[name]) for name in names})
        for name in self._runs:
            self._set_times(name, turns)
        self.save()

    def _set_times(self, name: str, turns: list[dict[str, float]]) -> None:
        seconds = [took[name] for took in turns]
        middle = statistics.median(seconds)
        first = self.first_of(self[name].group).name
        if name == first:
            # What it is compared with is its own median: the range shows the noise.
            ratios = [took / middle for took in seconds]
        else:
            ratios = [took[name] / took[first] for took in turns]
        after = self[name].after
        if after is not None:
            to_after = ratio_and_range([took[name] / took[after] for took in turns])
            self._change(
                name,
                after_ratio=to_after["ratio"],
                after_low=to_after["ratio_low"],
                after_high=to_after["ratio_high"],
            )
        self._change(
            name,
            seconds=middle,
            seconds_low=min(seconds),
            seconds_high=max(seconds),
            turns=len(turns),
            **ratio_and_range(ratios),
        )

    # --- what it says ---

    def first_of(self, group: str) -> EdgeRow:
        """The row that the others of the group are compared with. Raises KeyError without one."""
        for row in self.rows:
            if row.group == group:
                return row
        raise KeyError(f"no row is in the group {group!r}")

    def line(self, name: str) -> str:
        """One row as a sentence."""
        row = self[name]
        return f"{name}: {what_came(row, first=self.first_of(row.group))}"

    def table(self) -> list[list[str]]:
        """Header and rows as text cells."""
        return [HEADER, *(cells(row, first=self.first_of(row.group)) for row in self.rows)]

    def chart(
        self,
        group: str,
        *,
        leave_out: Collection[str] = (),
        tested: int | None = None,
        title: str | None = None,
    ) -> Any:
        """Size against quality: a point for each row of the group but those to leave out.

        `tested` is how many images the accuracies were counted on: it draws the band of chance.
        Raises ValueError for a group without rows, and for one whose quality is an agreement: it
        says how near a file is to its model, and not how good.
        """
        points = []
        for row in self.rows:
            if row.group == group:
                points.append(point_of(row))
        return size_error_chart(points, leave_out=leave_out, tested=tested, title=title)

    def _check_quality(self, group: str, **qualities: float | None) -> None:
        given = [kind for kind, value in qualities.items() if value is not None]
        if len(given) != 1:
            raise ValueError("a row has one quality: give accuracy=, perplexity= or agreement=")
        kind = given[0]
        if kind == "perplexity":
            check_number(perplexity=qualities[kind], above=0)
        else:
            check_share(**{kind: qualities[kind]})
        for row in self.rows:
            if row.group == group and getattr(row, kind) is None:
                raise ValueError(
                    f"the rows of {group!r} have another kind of quality than {kind}: give all of "
                    f"them the same"
                )


def point_of(row: EdgeRow) -> SizeError:
    """A row as a point of the chart. Raises ValueError for a row that has an agreement only."""
    if row.agreement is not None:
        raise ValueError(
            f"{row.name} has an agreement: a chart of size against quality needs accuracy= or "
            f"perplexity="
        )
    if row.accuracy is not None:
        return SizeError(row.name, row.file_bytes, accuracy=row.accuracy)
    return SizeError(row.name, row.file_bytes, perplexity=row.perplexity)


def _seconds_per_unit(run: Callable[[], Any], units: int) -> float:
    """The median call of as many as fill `SHORTEST` seconds, and of `MOST_CALLS` at most."""
    seconds: list[float] = []
    total = 0.0
    while total < SHORTEST and len(seconds) < MOST_CALLS:
        took, _ = timed(run)
        seconds.append(took)
        total += took
    return statistics.median(seconds) / units
