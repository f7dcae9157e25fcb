"""The ladder of a notebook about many GPUs: what each strategy keeps and sends, on every rank.

ladder = RankLadder("02_multi_gpu_training")
ladder.climb("one process", run, predicted=plan)                    # run() -> core.rank_run.RankRun
ladder.climb("DDP", run, predicted=plan, predicted_sent=50_000_000)
ladder.take_turns(rounds=3)                  # runs all of them again, in turns
ladder                                       # a table in Jupyter, text in a terminal
ladder.chart()                               # a matplotlib figure

All rows train the same model on the same batches. So the losses have to be the same numbers, and
`loss_difference` is the largest difference to the first row in any step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from recipes_lib.core.checks import check_whole
from recipes_lib.core.measure import there_and_back
from recipes_lib.core.predict.budget import Budget
from recipes_lib.core.ranks.rank_run import RankRun
from recipes_lib.report.ladder_text import wrapped
from recipes_lib.report.rank_bytes_chart import RankBar, rank_bytes_chart
from recipes_lib.report.rank_ladder_text import HEADER, cells, what_came, what_is_expected
from recipes_lib.report.rows import Rows
from recipes_lib.report.turns import announce, ratio_and_range


@dataclass(frozen=True)
class RankRow:
    """One strategy: bytes of a rank, predicted and measured, what it sends, and how long it takes.

    `seconds` is the median over the steps of all turns; `ratio` is the time over that of the first
    row in the same round, with its range. `loss_difference` is None for the first row.
    """

    name: str
    ranks: int
    parameters: int
    gradients: int
    states: int
    sent_bytes: int
    losses: list[float]
    seconds: float
    predicted_parameters: int
    predicted_gradients: int
    predicted_states: int
    predicted_sent: int | None = None
    calls: dict[str, int] = field(default_factory=dict)
    group: str = ""
    note: str = ""
    loss_difference: float | None = None
    turns: int = 0
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None

    @property
    def kept_bytes(self) -> int:
        """What a rank keeps."""
        return self.parameters + self.gradients + self.states

    @property
    def predicted_bytes(self) -> int:
        """What the arithmetic expects it to keep."""
        return self.predicted_parameters + self.predicted_gradients + self.predicted_states


class RankLadder(Rows):
    """What each strategy keeps and sends per rank, compared with the first row."""

    def __init__(self, name: str, *, folder: Path | None = None) -> None:
        super().__init__(name, folder=folder)
        self._runs: dict[str, Callable[[], RankRun]] = {}

    # --- add a row ---

    def climb(
        self,
        name: str,
        run: Callable[[], RankRun],
        *,
        predicted: Budget,
        predicted_sent: int | None = None,
        group: str = "",
        note: str = "",
    ) -> None:
        """Say what the arithmetic expects, run the strategy, and add the row.

        Args:
            run: trains a few steps on all ranks; called again by `take_turns`.
            predicted: the budget of one rank.
            predicted_sent: bytes that one rank sends in a step, if there is a formula.
            group: the heading above this row.
            note: a remark that is kept with the row.
        Raises ValueError for a name that is taken, and for a run of another number of steps than
        that of the first row.
        """
        self._check_new(name)
        print(f"{name}: {what_is_expected(predicted, predicted_sent)}")
        came = run()
        difference = None
        if self.rows:
            difference = _largest_difference(name, came.losses, self.rows[0].losses)
        row = RankRow(
            name=name,
            ranks=came.ranks,
            parameters=came.parameters,
            gradients=came.gradients,
            states=came.states,
            sent_bytes=came.sent_bytes,
            calls=came.calls,
            losses=came.losses,
            seconds=statistics.median(came.seconds),
            predicted_parameters=predicted.weights,
            predicted_gradients=predicted.gradients,
            predicted_states=predicted.states,
            predicted_sent=predicted_sent,
            group=group,
            note=note,
            loss_difference=difference,
        )
        self.append(row)
        self._runs[name] = run
        print(wrapped(what_came(row)))

    # --- time in turns ---

    def take_turns(self, rounds: int = 3) -> None:
        """Run all rows again, there and back, and compare their times round by round.

        The file is saved after every round. Raises ValueError for less than one round, and if no
        row has climbed.
        """
        check_whole(rounds=rounds)
        if not self._runs:
            raise ValueError("no row can take turns: add rows with climb, which knows their runs")
        announce(list(self._runs))
        first = self.rows[0].name
        turns: list[dict[str, float]] = []
        for names in there_and_back(list(self._runs), rounds=rounds):
            turns.append({name: statistics.median(self._runs[name]().seconds) for name in names})
            self._set_times(turns, first=first)

    def _set_times(self, turns: list[dict[str, float]], *, first: str) -> None:
        middle = statistics.median(took[first] for took in turns)
        for name in self._runs:
            seconds = [took[name] for took in turns]
            ratios = [took[name] / took[first] for took in turns]
            if name == first:
                # What it is compared with is its own median: the range shows the noise.
                ratios = [took / middle for took in seconds]
            self._change(
                name,
                seconds=statistics.median(seconds),
                turns=len(turns),
                **ratio_and_range(ratios),
            )
        self.save()

    # --- what it says ---

    def line(self, name: str) -> str:
        """One row as a sentence."""
        return f"{name}: {what_came(self[name])}"

    def table(self) -> list[list[str]]:
        """Header and rows as text cells."""
        return [HEADER, *(cells(row, first=self.rows[0]) for row in self.rows)]

    def chart(self, *, title: str | None = None) -> Any:
        """Stacked bars of what a rank keeps, inside the outline of what was predicted."""
        bars = [RankBar(**_bar_of(asdict(row))) for row in self.rows]
        return rank_bytes_chart(bars, title=title)


def _bar_of(row: dict[str, Any]) -> dict[str, Any]:
    """What a bar needs of a row."""
    return {
        "name": row["name"],
        "group": row["group"],
        "weights": row["parameters"],
        "gradients": row["gradients"],
        "states": row["states"],
        "predicted": row["predicted_parameters"]
        + row["predicted_gradients"]
        + row["predicted_states"],
    }


def _largest_difference(name: str, losses: list[float], reference: list[float]) -> float:
    if len(losses) != len(reference):
        raise ValueError(
            f"{name} trained {len(losses)} steps and the first row {len(reference)}: give all rows "
            f"the same number of steps"
        )
    pairs = zip(losses, reference, strict=True)
    return max(abs(loss - other) for loss, other in pairs)
