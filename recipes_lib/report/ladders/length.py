"""How long a text may be: predicted, and found (notebook 04)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from recipes_lib.core.measure.machine import machine
from recipes_lib.report.charts.figure import NARROW, new_figure, set_up
from recipes_lib.report.ladder import Column, Ladder, Row
from recipes_lib.report.style import FACTOR, INK, RECIPE, WHOLE, measured_here


def off_by(error: float) -> str:
    """A share as a signed percentage; what rounds to nothing has no sign."""
    percent = round(100 * error, 1)
    return f"{percent:+.1f}%" if percent else "0.0%"


class LengthLadder(Ladder):
    """How long a sequence each step allows within one limit of bytes.

    `tokens` is the longest that fits, `crossing` where the bytes reach the limit, with which the
    prediction is compared. Loss and gradients are those of a shorter text, which every row can do.
    Times are those of `timed_at` tokens, beside the row `against`.
    """

    def __init__(self, name: str, *, timed_at: int, against: str) -> None:
        """A ladder of the longest texts, with a time at one length."""
        self.against = against
        columns = (
            Column("predicted_tokens", "predicted", "tokens", WHOLE),
            Column("tokens", "longest", "tokens", WHOLE),
            Column("prediction_error", "off by", "", off_by),
            Column("times_baseline", "× baseline", "×", "{:.1f}".format),
            Column("ratio", f"time at {timed_at:,}, ×", "×", FACTOR),
            Column("gradient_error", "gradients off by", "", "{:.0e}".format),
            Column("loss", unit="nats"),
            Column("crossing", unit="tokens"),
            Column("times_previous", unit="×"),
            Column("peak_bytes", unit="B"),
            Column("seconds", unit="s"),
        )
        super().__init__(name, columns)

    def add(
        self,
        name: str,
        *,
        tokens: int,
        crossing: float,
        peak_bytes: int,
        predicted: int | None,
        loss: float | None = None,
        gradient_error: float | None = None,
    ) -> Row:
        """Append a length, save the file and return the row. `set_times` brings its times.

        `predicted` is None where no arithmetic holds; `gradient_error` is how far the gradients are
        from those of the first row, as a part of them.
        """
        row = Row(name=name, tokens=tokens, crossing=crossing, peak_bytes=peak_bytes, loss=loss)
        row.gradient_error = gradient_error
        row.predicted_tokens = predicted
        if predicted is not None:
            row.prediction_error = predicted / round(crossing) - 1
        row.times_baseline = 1.0
        if self.rows:
            row.times_baseline = tokens / self.rows[0].tokens
            row.times_previous = tokens / self.rows[-1].tokens
        return self.append(row)

    def first_of(self, row: Row) -> Row:
        """The row of lengths that times are compared with."""
        named = [each for each in self.rows if each.name == self.against]
        return [*named, self.rows[0]][0]

    def chart(
        self,
        *,
        title: str | None = None,
        strong: Collection[str] = (),
        key: tuple[str, str] | None = None,
    ) -> Any:
        """The longest sequence of each row, from short to long, on a logarithmic axis.

        A factor has one width there, and no line has a beginning, so each row is a point. Rows
        named in `strong` have a colour; without any, all but the first. `key` says what rows with
        and without a colour have in common.
        """
        rows = sorted(self.rows, key=lambda row: row.tokens)
        shortest, longest = rows[0].tokens, rows[-1].tokens
        strong = strong or [row.name for row in self.rows[1:]]
        title = title or f"The longest text that fits: {longest:,} tokens"
        height = 0.42 * len(rows) + 1
        look = {"height": height, "width": NARROW, "source": counted_here()}
        if key is not None:
            look["key"] = dict(zip(key, (RECIPE, INK)))
        figure, axes = new_figure(title, **look)
        for number, row in enumerate(rows):
            color = RECIPE if row.name in strong else INK
            axes.plot(row.tokens, -number, "o", color=color, markersize=9)
            words = f"{row.tokens:,} (×{row.times_baseline:.1f})"
            place = {"xytext": (9, 0), "textcoords": "offset points", "va": "center"}
            axes.annotate(words, (row.tokens, -number), fontsize=12, color=color, **place)
        set_up(axes, xscale="log", xlabel="tokens, logarithmic")
        axes.set_xlim(shortest / 2, 150 * longest)  # room for the words
        tens = [10**power for power in range(1, 10)]
        axes.set_xticks([ten for ten in tens if shortest / 2 < ten < 2 * longest])
        axes.xaxis.set_major_formatter("{x:,.0f}")
        names = [row.name for row in rows]
        axes.set_yticks([-number for number in range(len(names))], names, fontsize=12)
        return figure


def counted_here() -> str:
    """The source line of lengths that were searched for: in dry steps on a CPU."""
    source = measured_here()
    if machine().device == "cpu":
        return source.replace("measured on", "counted in dry steps on")
    return source


def duration(seconds: float) -> str:
    """Seconds in words of two digits: "4.2 s", "12 min", "1.7 h"."""
    if seconds < 100:
        return f"{seconds:.2g} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
