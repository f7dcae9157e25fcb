"""The ladder of a notebook about length: how many tokens fit, predicted beside found.

ladder = LengthLadder("04_training_long_sequences")
ladder.add("baseline", tokens=3072, crossing=3090.5, peak_bytes=GIB, predicted=3100)
ladder.gain("everything combined")   # how many times as long as the baseline
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from recipes_lib.report import charts
from recipes_lib.report.rows import Rows


@dataclass(frozen=True)
class LengthRow:
    """One step: the longest sequence in tokens, as predicted and as found.

    `crossing` is where the bytes reach the limit, between the longest that fits and the next that
    was tried; the prediction is compared with it. Seconds and loss are those of a step at a length
    that every row can do.
    """

    name: str
    predicted_tokens: int
    tokens: int
    crossing: float
    peak_bytes: int
    seconds: float | None
    loss: float | None

    @property
    def prediction_error(self) -> float:
        """Relative, positive if the prediction was too high."""
        return self.predicted_tokens / self.crossing - 1


class LengthLadder(Rows):
    """How long a sequence each step allows within one limit of bytes."""

    def add(
        self,
        name: str,
        *,
        tokens: int,
        crossing: float,
        peak_bytes: int,
        predicted: int,
        loss: float | None = None,
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
            seconds=None,  # `retime` brings it
            loss=loss,
        )
        return self.append(row)

    def retime(self, name: str, seconds: float) -> None:
        """Give a row the time of a step that took turns with those of the other rows."""
        self._change(name, seconds=seconds)
        self.save()

    def gain(self, name: str) -> float:
        """How many times as long as the baseline's."""
        return self[name].tokens / self.rows[0].tokens

    def line(self, name: str) -> str:
        """One row as a sentence."""
        row = self[name]
        sentence = f"{name}: expected {row.predicted_tokens:,} tokens, found {row.tokens:,}"
        if row is not self.rows[0]:
            sentence += f", {self.gain(name):.1f}× the baseline"
        if row.loss is not None:
            sentence += f"; loss {row.loss:.5f}"
        return sentence

    def table(self) -> list[list[str]]:
        """Header and rows as text cells."""
        header = ["step", "predicted tokens", "longest found", "off by"]
        header += ["× previous", "× baseline", "time", "loss"]
        cells = [header]
        for position, row in enumerate(self.rows):
            cells.append(self._cells(row, position))
        return cells

    def _cells(self, row: LengthRow, position: int) -> list[str]:
        to_previous = ""
        if position > 0:  # the baseline has nothing before it
            to_previous = f"{row.tokens / self.rows[position - 1].tokens:.2f}"
        time = ""
        if row.seconds:  # relative: all rows are timed at one length
            time = f"{row.seconds / self.rows[0].seconds:.2f}×"
        loss = ""
        if row.loss is not None:
            loss = f"{row.loss:.5f}"
        return [
            row.name,
            f"{row.predicted_tokens:,}",
            f"{row.tokens:,}",
            f"{row.prediction_error:+.1%}",
            to_previous,
            f"{self.gain(row.name):.1f}",
            time,
            loss,
        ]

    def chart(self, *, title: str | None = None) -> Any:
        """Bars of the longest sequences with the predictions as ticks. Returns the figure.

        Without a title it says what the ladder has reached as a whole.
        """
        rows = [asdict(row) for row in self.rows]
        return charts.length_chart(rows, title=title)
