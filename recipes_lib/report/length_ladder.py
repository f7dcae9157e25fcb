"""The ladder of a notebook about length: how many tokens fit, predicted beside found.

ladder = LengthLadder("04_training_long_sequences")
ladder.add("baseline", tokens=3072, crossing=3090.5, peak_bytes=GIB, predicted=3100)
ladder.set_times({"baseline": [2.0, 2.1], "everything combined": [3.0, 3.1]})
ladder.gain("everything combined")   # how many times as long as the baseline
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recipes_lib.report import charts
from recipes_lib.report.ladder_text import ratio_with_range
from recipes_lib.report.rows import Rows
from recipes_lib.report.turns import ratio_and_range


@dataclass(frozen=True)
class LengthRow:
    """One step: the longest sequence in tokens, as predicted and as found.

    `crossing` is where the bytes reach the limit, between the longest that fits and the next that
    was tried; the prediction is compared with it. Seconds, ratio and loss are those of a step at a
    length that every row can do. `ratio` is the time over the baseline's of the same round: the
    median of the rounds, the lowest and the highest. `least_seconds` is what a step of the longest
    row takes at least: its operations over the rate of the device.
    """

    name: str
    predicted_tokens: int
    tokens: int
    crossing: float
    peak_bytes: int
    seconds: float | None
    loss: float | None
    least_seconds: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None

    @property
    def prediction_error(self) -> float:
        """Relative, positive if the prediction was too high."""
        return self.predicted_tokens / round(self.crossing) - 1


class LengthLadder(Rows):
    """How long a sequence each step allows within one limit of bytes.

    `timed_at` is the length of the steps that are timed, and whose losses are compared.
    """

    def __init__(
        self, name: str, *, timed_at: int | None = None, folder: Path | None = None
    ) -> None:
        super().__init__(name, folder=folder)
        self.timed_at = timed_at

    def add(
        self,
        name: str,
        *,
        tokens: int,
        crossing: float,
        peak_bytes: int,
        predicted: int,
        loss: float | None = None,
        least_seconds: float | None = None,
    ) -> LengthRow:
        """Append a row, save the file and return the row.

        Args:
            tokens: the longest sequence that fits, with its `peak_bytes`.
            crossing: where the bytes reach the limit; in doubt the tokens themselves.
        Raises ValueError for a name that is taken.
        """
        row = LengthRow(
            name=name,
            predicted_tokens=predicted,
            tokens=tokens,
            crossing=crossing,
            peak_bytes=peak_bytes,
            seconds=None,  # `set_times` brings them
            loss=loss,
            least_seconds=least_seconds,
        )
        return self.append(row)

    def set_times(self, seconds: dict[str, list[float]]) -> None:
        """Give the rows the times of their turns: for each row, the seconds of every round.

        Raises ValueError if the first row is missing, or a row has another number of rounds.
        """
        baseline = self.rows[0].name
        if baseline not in seconds:
            raise ValueError(
                f"seconds are of {sorted(seconds)}: give those of {baseline!r} as well"
            )
        of_baseline = seconds[baseline]
        for name, turns in seconds.items():
            if len(turns) != len(of_baseline):
                raise ValueError(
                    f"{name!r} has {len(turns)} rounds and the first row {len(of_baseline)}: give "
                    f"the rows the same rounds"
                )
        for name, turns in seconds.items():
            ratios = [mine / first for mine, first in zip(turns, of_baseline, strict=True)]
            self._change(name, seconds=statistics.median(turns), **ratio_and_range(ratios))
        self.save()

    def gain(self, name: str) -> float:
        """How many times as long as the baseline's."""
        return self[name].tokens / self.rows[0].tokens

    def line(self, name: str) -> str:
        """One row as a sentence."""
        row = self[name]
        sentence = f"{name}: predicted {row.predicted_tokens:,} tokens, found {row.tokens:,}"
        if row is not self.rows[0]:
            sentence += f", {self.gain(name):.1f}× the baseline"
        if row.loss is not None:
            sentence += f"; loss {row.loss:.5f}"
        return sentence

    def table(self) -> list[list[str]]:
        """Header and rows as text cells."""
        length = ""
        if self.timed_at is not None:
            length = f" at {self.timed_at:,}"
        header = ["step", "predicted tokens", "found", "off by", "× previous", "× baseline"]
        header += ["a step there, at least", f"time{length}", f"loss{length}"]
        cells = [header]
        for position, row in enumerate(self.rows):
            cells.append(self._cells(row, position))
        return cells

    def _cells(self, row: LengthRow, position: int) -> list[str]:
        to_previous = ""
        if position > 0:  # the baseline has nothing before it
            to_previous = f"{row.tokens / self.rows[position - 1].tokens:.2f}"
        time = ""
        if row.ratio is not None:
            time = "1" if position == 0 else ratio_with_range(row)
        loss = ""
        if row.loss is not None:
            loss = f"{row.loss:.5f}"
        return [
            row.name,
            f"{row.predicted_tokens:,}",
            f"{row.crossing:,.0f}",
            f"{row.prediction_error:+.1%}",
            to_previous,
            f"{self.gain(row.name):.1f}",
            _duration(row.least_seconds),
            time,
            loss,
        ]

    def chart(self, *, title: str | None = None) -> Any:
        """Bars of the longest sequences with the predictions as ticks. Returns the figure.

        Without a title it says what the ladder has reached as a whole.
        """
        rows = [asdict(row) for row in self.rows]
        return charts.length_chart(rows, title=title)


def _duration(seconds: float | None) -> str:
    """Seconds in words of two digits: "4.2 s", "12 min", "1.7 h"."""
    if seconds is None:
        return ""
    if seconds < 100:
        return f"{seconds:.2g} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
