"""The longest sequence that fits into a memory: predicted with arithmetic, found by bisection, kept as a ladder.

    expected = predicted_longest(lambda S: budget_of(model, batch_size=1, seq_len=S), limit_bytes=4 * GIB)
    step(16)  # AdamW makes its states at the end of the first step: let that one be short
    found = find_longest(peak_of(step, optimizer.zero_grad), limit_bytes=4 * GIB, start=expected)

On a GPU `peak` takes a real step. On a CPU, where a step of so many tokens takes minutes, it takes a *dry* one
(`core.measure.dry_run`): the same operators on tensors without data, counted by the same account. `Ladder`'s rows then
hold tokens in place of bytes.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from recipes_lib.core.budget import Budget
from recipes_lib.core.machine import GIB, machine
from recipes_lib.core.measure import PeakMemory, dry_run
from recipes_lib.report.ladder import Ladder
from recipes_lib.report.style import blank_figure

LONGEST = 2**30  # tokens: beyond it indices of 32 bits end


@dataclass(frozen=True)
class Search:
    """The longest sequence that fits, in tokens; `peaks` holds the bytes of every length tried, None: too long."""

    tokens: int
    limit_bytes: int
    peaks: dict[int, int | None] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        return self.peaks[self.tokens]

    @property
    def crossing(self) -> float:
        """Where the bytes reach the limit, in tokens: on the line between the longest that fits and the next length
        above it, or the former if nothing is known of the latter's bytes (it ran out of memory)."""
        above = min((tokens for tokens in self.peaks if tokens > self.tokens), default=self.tokens)
        if above == self.tokens or self.peaks[above] is None:
            return self.tokens
        share = (self.limit_bytes - self.peak_bytes) / (self.peaks[above] - self.peak_bytes)
        return self.tokens + share * (above - self.tokens)


def predicted_longest(plan: Callable[[int], Budget], *, limit_bytes: int) -> int:
    """The largest S with `plan(S).peak <= limit_bytes`, by bisection over the arithmetic.

    Raises ValueError if not even two tokens fit, of which the second is predicted from the first.
    """
    if plan(2).peak > limit_bytes:
        raise ValueError(
            f"limit_bytes={limit_bytes:,}: two tokens are predicted to take {plan(2).peak:,} bytes, most of it weights "
            f"and optimizer states; shrink those first (LoRA, 8-bit states), or give more memory"
        )
    fits, too_long = 2, 4
    while too_long < LONGEST and plan(too_long).peak <= limit_bytes:
        fits, too_long = too_long, 2 * too_long
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        fits, too_long = (middle, too_long) if plan(middle).peak <= limit_bytes else (fits, middle)
    return fits


def find_longest(
    peak: Callable[[int], int],
    *,
    limit_bytes: int,
    start: int,
    resolution: float = 0.01,
    most: int = LONGEST,
) -> Search:
    """Bisect for the longest sequence whose step stays within `limit_bytes`, from a guess `start`.

    Args:
        peak: takes a step of so many tokens; gives its peak in bytes, or raises torch.OutOfMemoryError. Take a short
            step before, which makes the optimizer's states: the first length would be judged without them.
        resolution: stop when the shortest length that failed is at most this part above the longest that passed.
        most: the longest length to try; where it fits, it is the result.
    Raises ValueError for a start outside 1 … `most`, a resolution outside (0, 1), and if nothing fits.
    """
    if not 1 <= start <= most or not 0 < resolution < 1:
        given = f"start={start}, most={most}, resolution={resolution}"
        raise ValueError(
            f"{given}: start at 1 token or more and at `most`, resolution between 0 and 1"
        )
    peaks: dict[int, int | None] = {}

    def fits(tokens: int) -> bool:
        try:
            peaks[tokens] = peak(tokens)
        except torch.OutOfMemoryError:
            peaks[tokens] = None
        return peaks[tokens] is not None and peaks[tokens] <= limit_bytes

    # A bracket first: the guess is good, so go away from it by little, then by more.
    low, high, tokens, stride = 0, most + 1, start, resolution
    while low < most and not (low and high <= most):
        if fits(tokens):
            low, tokens = tokens, min(max(tokens + 1, math.floor(tokens * (1 + stride))), most)
        else:
            high, tokens = tokens, min(tokens - 1, math.ceil(tokens / (1 + stride)))
        if tokens < 1:
            raise ValueError(
                f"limit_bytes={limit_bytes:,}: not even one token fits (the peaks tried: {peaks})"
            )
        stride *= 2
    while high - low > max(1, resolution * low):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return Search(low, limit_bytes, peaks)


def peak_of(
    step: Callable[[int], Any], clear: Callable[[], Any], *, limit_bytes: int | None = None
) -> Callable:
    """The `peak` for `find_longest`: bytes of `step(tokens)`; `clear` frees what a step that ran out of memory left.

    Inside `dry_run` give no limit: nothing runs out, and the peak of a length that is too long is known as well.
    """

    def peak(tokens: int) -> int:
        try:
            with PeakMemory(limit_bytes=limit_bytes) as memory:
                step(tokens)
        except torch.OutOfMemoryError:
            clear()
            raise
        return memory.peak

    return peak


def search(
    arrange: Callable[[], tuple[Callable, Callable]],
    *,
    expected: int,
    limit_bytes: int,
    also: Iterable[int] = (),
) -> Search:
    """`find_longest` for a training step: real steps on a GPU, dry ones on a CPU.

    Args:
        arrange: builds model and optimizer and returns (step, clear) of `peak_of`; called inside the dry run.
        also: lengths whose peaks are wanted beside those that the search tries.
    """
    with dry_run() if machine().device == "cpu" else contextlib.nullcontext():
        step, clear = arrange()
        step(16)  # makes the optimizer's states
        peak = peak_of(step, clear)
        found = find_longest(peak, limit_bytes=limit_bytes, start=expected)
        found.peaks.update({tokens: peak(tokens) for tokens in also})
    return found


def recorded(part: str) -> dict[str, Any] | None:
    """The newest recorded result of a part of `benchmarks.gpu`, of any machine: for what takes too long to run here."""
    files = (Path(__file__).parents[1] / "benchmarks" / "results").glob("*.json")
    runs = [
        run for run in map(json.loads, (file.read_text() for file in files)) if part in run["parts"]
    ]
    return max(runs, key=lambda run: run["date"])["parts"][part] if runs else None


@dataclass(frozen=True)
class LengthRow:
    """One step: tokens as predicted, as found, and where the bytes reach the limit (`Search.crossing`); time and loss
    of a step at a length that every row can do."""

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


class LengthLadder(Ladder):
    """Rows in the order of the steps; the first is the baseline."""

    def add(
        self, name: str, found: Search, *, predicted: int, loss: float | None = None
    ) -> LengthRow:
        """Append a row, save the file and return the row. Raises ValueError for a name that is taken."""
        return self.append(
            LengthRow(name, predicted, found.tokens, found.crossing, found.peak_bytes, None, loss)
        )

    def retime(self, name: str, seconds: float) -> None:
        """Give a row the time of a step that took turns with those of the other rows."""
        self.rows[self.rows.index(self[name])] = replace(self[name], seconds=seconds)
        self.save()

    def gain(self, name: str) -> float:
        """How many times as long as the baseline's."""
        return self[name].tokens / self.rows[0].tokens

    def line(self, name: str) -> str:
        """One row as a sentence."""
        row = self[name]
        longer = "" if row is self.rows[0] else f", {self.gain(name):.1f}× the baseline"
        loss = f"; loss {row.loss:.5f}" if row.loss is not None else ""
        return (
            f"{name}: expected {row.predicted_tokens:,} tokens, found {row.tokens:,}{longer}{loss}"
        )

    def table(self) -> list[list[str]]:
        """Header and rows as text cells."""
        cells = [
            [
                "step",
                "predicted tokens",
                "longest found",
                "off by",
                "× previous",
                "× baseline",
                "time",
                "loss",
            ]
        ]
        for before, row in zip([None, *self.rows], self.rows, strict=False):
            cells.append(
                [
                    row.name,
                    f"{row.predicted_tokens:,}",
                    f"{row.tokens:,}",
                    f"{row.prediction_error:+.1%}",
                    f"{row.tokens / before.tokens:.2f}" if before else "",
                    f"{self.gain(row.name):.1f}",
                    f"{row.seconds / self.rows[0].seconds:.2f}×" if row.seconds else "",
                    f"{row.loss:.5f}" if row.loss is not None else "",
                ]
            )
        return cells

    def chart(self, *, title: str | None = None) -> Any:
        """Horizontal bars of the longest sequences, logarithmic, with the predictions as ticks. Returns the figure."""
        return length_chart([vars(row) for row in self.rows], title=title or machine().name)


def length_chart(rows: list[dict[str, Any]], *, title: str) -> Any:
    """Draw the rows of such a ladder, or of a recorded results file."""
    figure, axes = blank_figure(rows, (9, 0.42 * len(rows) + 1.3), bars=True)
    names, tokens = [row["name"] for row in rows], [row["tokens"] for row in rows]
    axes.barh(names, tokens, color=["#9aa5b1", *["#2f6f9f"] * (len(rows) - 1)], height=0.65)
    axes.plot(
        [row["predicted_tokens"] for row in rows],
        names,
        "|",
        color="#d1495b",
        markersize=15,
        label="predicted",
    )
    for y, length in enumerate(tokens):
        axes.annotate(f"{length:,}", (length, y), (8, 0), textcoords="offset points", va="center")
    axes.set(
        xscale="log",
        xlabel="longest sequence that fits, tokens",
        xlim=(min(tokens) / 2, max(tokens) * 2),
    )
    axes.legend(loc="upper right", frameon=False)
    figure.suptitle(title, fontsize=11)
    return figure


def growth_chart(curves: dict[str, dict[int, int]], *, fixed_bytes: int, limit_bytes: int) -> Any:
    """Draw bytes beyond the fixed ones against tokens, both logarithmic; the legend gives the slope at the end.

    A slope of 2 means: twice the tokens, four times the memory.
    """
    figure, axes = blank_figure(curves, (8, 3.6))
    for name, curve in curves.items():
        tokens = sorted(curve)
        grown = [(curve[length] - fixed_bytes) / GIB for length in tokens]
        axes.plot(
            tokens,
            grown,
            marker="o",
            markersize=3.5,
            label=f"{name}: slope {slope(curve, fixed_bytes):.2f}",
        )
    left = (limit_bytes - fixed_bytes) / GIB
    axes.axhline(
        left,
        color="#9aa5b1",
        linestyle="--",
        linewidth=1,
        label=f"the limit: {limit_bytes / GIB:.1f} GiB",
    )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="tokens in the sequence",
        ylabel="GiB beyond weights and states",
    )
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def slope(curve: dict[int, int], fixed_bytes: int = 0) -> float:
    """Exponent of the growth between the two longest lengths of a curve {tokens: bytes}."""
    (short, less), (long, more) = sorted(curve.items())[-2:]
    return math.log((more - fixed_bytes) / (less - fixed_bytes)) / math.log(long / short)


def position_chart(curves: dict[str, list[float]], *, window: int, trained: int, title: str) -> Any:
    """Draw the loss of every `window` tokens against their position, with a line where the training length ends."""
    figure, axes = blank_figure(curves, (8, 3.2))
    for name, losses in curves.items():
        axes.plot([(i + 0.5) * window for i in range(len(losses))], losses, label=name, alpha=0.8)
    axes.axvline(trained, color="#9aa5b1", linestyle="--", linewidth=1)
    axes.set(
        xlabel="position in the text (dashed: length of the training)",
        ylabel="loss, nats per token",
    )
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle(title, fontsize=11)
    return figure
