"""What each rank keeps and sends, and whether the losses agree (notebook 02)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from recipes_lib.core.ranks.run_result import RankRun
from recipes_lib.report.charts.bars import Bars, bars
from recipes_lib.report.ladder import RATIO, TIME, Column, Ladder, Row, same_to
from recipes_lib.report.style import TERMS, Unit, mib


class RankTurn:
    """A strategy that trains a few steps on all ranks; a call runs it again."""

    def __init__(self, run: Callable[[], RankRun]) -> None:
        self._run = run

    def __call__(self) -> dict[str, float]:
        self.came = self._run()
        return {"seconds": min(self.came.seconds)}


class RankLadder(Ladder):
    """What each strategy keeps and sends per rank. All rows train the same model on the same
    batches, so `loss_difference` is the largest difference to the first row in any step.
    """

    columns = (
        Column("ranks", "ranks"),
        Column("parameters", "weights", "B", mib),
        Column("gradients", "gradients", "B", mib),
        Column("states", "states", "B", mib),
        Column("predicted_bytes", "predicted", "B", mib),
        Column("kept_bytes", "measured", "B", mib),
        Column("sent_bytes", "sends", "B", mib),
        Column("predicted_sent", "expected", "B", mib),
        TIME,
        RATIO,
        Column("loss_difference", "loss to 1st", "nats", same_to),
        Column("losses", unit="nats"),
        Column("calls"),
    )

    def climb(
        self,
        name: str,
        run: Callable[[], RankRun],
        *,
        predicted: Any,
        predicted_sent: int | None = None,
        group: str = "",
    ) -> Row:
        """Say what the arithmetic expects, run the strategy, and add the row.

        Args:
            run: trains a few steps on all ranks; called again by `take_turns`.
            predicted: weights, gradients and states of one rank by arithmetic, in bytes.
            predicted_sent: bytes that one rank sends in a step, if there is a formula.
            group: the heading above this row.
        Raises ValueError for a name that is taken, and for a run of another number of steps than
        that of the first row.
        """
        parts = (predicted.weights, predicted.gradients, predicted.states)
        kept = sum(parts)
        weights, gradients, states = [mib(size).removesuffix(" MiB") for size in parts]
        expected = f"predicted {weights} of weights + {gradients} of gradients + {states} of states"
        expected += f" = {mib(kept)} per rank"
        if predicted_sent is not None:
            expected += f", sends {mib(predicted_sent)} per step"
        return super().climb(
            name,
            partial(RankTurn, run),
            look=self._bytes_of_rank,
            expected=expected,
            group=group,
            predicted_bytes=kept,
            predicted_sent=predicted_sent,
        )

    def _bytes_of_rank(self, turn: RankTurn) -> dict[str, Any]:
        """What a rank keeps and sends under the strategy, and its losses beside the first row's."""
        seconds = turn()["seconds"]
        came = turn.came
        difference = None
        if self.rows:
            pairs = zip(came.losses, self.rows[0].losses, strict=True)
            difference = max(abs(value - other) for value, other in pairs)
        measured = vars(came) | {"seconds": seconds, "kept_bytes": came.kept_bytes}
        return measured | {"loss_difference": difference}

    def chart(self) -> Any:
        """Stacked bars of what a rank keeps, with what was predicted as ticks."""
        kept = {row.name: row.kept_bytes for row in self.rows}
        least = min(kept, key=kept.__getitem__)
        change = f"{mib(self.rows[0].kept_bytes)} → {mib(kept[least])} per rank with {least}"
        return rank_bytes_chart(self.rows, title=change)


def rank_bytes_chart(rows: Sequence[Any], *, title: str) -> Any:
    """What a rank keeps, of whatever has name, group, parameters, gradients, states and
    predicted_bytes.
    """
    kept = [row.parameters + row.gradients + row.states for row in rows]
    unit = Unit(max(kept))
    parts = {
        "weights": [unit.of(row.parameters) for row in rows],
        "states": [unit.of(row.states) for row in rows],
        "gradients": [unit.of(row.gradients) for row in rows],
    }
    column = Bars(
        f"{unit.name} that one rank keeps",
        parts,
        [unit.number(size) for size in kept],
        marks=[unit.of(row.predicted_bytes) for row in rows],
        colors=TERMS,
    )
    names = [row.name for row in rows]
    return bars(names, column, title=title, groups=[row.group for row in rows])
