"""How long a text may be: predicted, and found (notebook 04)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recipes_lib.report.figure import new_figure, set_up
from recipes_lib.report.ladder import Column, Ladder, Row
from recipes_lib.report.style import FACTOR, INK, RECIPE, WHOLE


class LengthLadder(Ladder):
    """How long a sequence each step allows within one limit of bytes.

    `tokens` is the longest that fits, `crossing` where the bytes reach the limit, with which the
    prediction is compared. The loss is that of a text of `loss_at` tokens, which every row can do.
    Times are those of `timed_at` tokens, beside the row `against`.
    """

    def __init__(
        self,
        name: str,
        *,
        loss_at: int,
        timed_at: int,
        against: str = "",
        folder: Path | None = None,
    ) -> None:
        self.against = against
        columns = (
            Column("predicted_tokens", "predicted", "tokens", WHOLE),
            Column("crossing", "found", "tokens", WHOLE),
            Column("prediction_error", "off by", "", "{:+.1%}".format),
            Column("times_previous", "× previous", "×", FACTOR),
            Column("times_baseline", "× baseline", "×", "{:.1f}".format),
            Column("ratio", f"time at {timed_at:,}, ×", "×", FACTOR),
            Column("loss", f"loss at {loss_at:,}", "nats", "{:.4f}".format),
            Column("tokens", unit="tokens"),
            Column("peak_bytes", unit="B"),
            Column("seconds", unit="s"),
        )
        super().__init__(name, columns, folder=folder)

    def add(
        self,
        name: str,
        *,
        tokens: int,
        crossing: float,
        peak_bytes: int,
        predicted: int | None,
        loss: float | None = None,
    ) -> Row:
        """Append a row, save the file and return the row. `set_times` brings its times.

        `predicted` is None where no arithmetic holds.
        """
        row = Row(name=name, tokens=tokens, crossing=crossing, peak_bytes=peak_bytes, loss=loss)
        row.predicted_tokens = predicted
        if predicted is not None:
            row.prediction_error = predicted / round(crossing) - 1
        row.times_baseline = 1.0
        if self.rows:
            row.times_baseline = tokens / self.rows[0].tokens
            row.times_previous = tokens / self.rows[-1].tokens
        return self.append(row)

    def first_of(self, row: Row) -> Row:
        """The row that times are compared with."""
        named = [each for each in self.rows if each.name == self.against]
        return [*named, self.rows[0]][0]

    def gain(self, name: str) -> float:
        """How many times as long as the baseline's."""
        return self[name].times_baseline

    def chart(self, *, title: str | None = None) -> Any:
        """The longest sequence of each row, on a logarithmic axis: a factor has one width.

        Without a title it says how long the longest is.
        """
        longest = max(row.tokens for row in self.rows)
        title = title or f"The longest sequence that fits: {longest:,} tokens"
        figure, axes = new_figure(title, height=0.3 * len(self.rows) + 1)
        set_up(axes, xscale="log", xlabel="longest sequence that fits, tokens", yticks=[])
        for number, row in enumerate(self.rows):
            color = RECIPE if number else INK
            axes.plot([self.rows[0].tokens / 2, row.tokens], [-number, -number], color=color)
            axes.plot(row.tokens, -number, "o", color=color, markersize=7)
            words = f" {row.name}: {row.tokens:,}, ×{row.times_baseline:.1f}"
            axes.annotate(
                words,
                (row.tokens, -number),
                xytext=(6, 0),
                va="center",
                color=color,
                textcoords="offset points",
            )
        axes.set_xlim(self.rows[0].tokens / 2, 12 * longest)  # room for the words
        return figure


def duration(seconds: float) -> str:
    """Seconds in words of two digits: "4.2 s", "12 min", "1.7 h"."""
    if seconds < 100:
        return f"{seconds:.2g} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
