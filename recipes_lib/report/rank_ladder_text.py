"""What a ladder of ranks says: the lines that `climb` prints, and the cells of its table."""

from __future__ import annotations

from typing import Any

from recipes_lib.core.predict.budget import Budget
from recipes_lib.report.ladder_text import ratio_with_range
from recipes_lib.report.style import MIB, mib

HEADER = ["strategy", "ranks", "weights", "gradients", "states", "predicted", "measured"]
HEADER += ["sends", "expected", "s/step", "time", "loss to 1st"]


def what_is_expected(plan: Budget, sent: int | None) -> str:
    """What a rank will keep and send by arithmetic."""
    kept = plan.weights + plan.gradients + plan.states
    sentence = (
        f"predicted {megabytes(plan.weights)} of weights + {megabytes(plan.gradients)} of "
        f"gradients + {megabytes(plan.states)} of states = {megabytes(kept)} MiB per rank"
    )
    if sent is not None:
        sentence += f", sends {megabytes(sent)} MiB per step"
    return sentence


def what_came(row: Any) -> str:
    """What a rank kept and sent, how long a step took, and whether the loss is the same."""
    sentence = f"measured {megabytes(row.kept_bytes)} MiB per rank"
    if row.calls:
        calls = ", ".join(f"{count} {kind}" for kind, count in row.calls.items())
        sentence += f"; sent {megabytes(row.sent_bytes)} MiB per step ({calls})"
    sentence += f"; {row.seconds:.2f} s per step"
    if row.loss_difference is not None:
        sentence += f"; all losses those of the first row {same_to(row.loss_difference)}"
    return sentence


def cells(row: Any, *, first: Any) -> list[str]:
    """The cells of a row, below HEADER; MiB per rank."""
    expected = ""
    if row.predicted_sent is not None:
        expected = mib(row.predicted_sent)
    time = f"{row.seconds / first.seconds:.2f}×"
    if row.ratio is not None:
        time = ratio_with_range(row)
    difference = ""
    if row.loss_difference is not None:
        difference = same_to(row.loss_difference)
    return [
        row.name,
        str(row.ranks),
        megabytes(row.parameters),
        megabytes(row.gradients),
        megabytes(row.states),
        mib(row.predicted_bytes),
        mib(row.kept_bytes),
        mib(row.sent_bytes),
        expected,
        f"{row.seconds:.2f}",
        time,
        difference,
    ]


def same_to(difference: float) -> str:
    """ "to 3e-08", or "to the last bit"."""
    if difference == 0:
        return "to the last bit"
    return f"to {difference:.0e}"


def megabytes(size: float) -> str:
    """Bytes in MiB, with one digit where there are few."""
    value = size / MIB
    if value < 10:
        return f"{value:.1f}"
    return f"{value:,.0f}"
