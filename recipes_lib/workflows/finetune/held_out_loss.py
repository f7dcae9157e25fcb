"""What a run has reached: the held-out loss before and after, and the difference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recipes_lib.core.data.tokens_and_labels import Row
from recipes_lib.fine_tuning.honest_evaluation import RowLosses, compare, held_out_losses
from recipes_lib.workflows.finetune.settings import Settings

LEAST_ROWS = 10  # held out, for any verdict
RELIABLE_ROWS = 30  # held out; with fewer the interval is too narrow
ROWS_AT_ONCE = 8  # in one forward pass, where they are short


def held_out_loss(
    model: Any, rows: Sequence[Row], when: str, *, run: Settings, pad_token_id: int
) -> RowLosses:
    """The loss of each held-out row. Prints their mean, and first that they are measured.

    A batch holds at most as many tokens as a micro-batch of the training, so that it fits where
    the training fits. Before and after it is the same batch: the comparison is paired.

    Args:
        when: "before" or "after".
    """
    print(f"measuring the held-out loss {when}, of {len(rows)} rows", flush=True)
    longest = max(len(row["input_ids"]) for row in rows)
    fitting = run.micro_batch_size * run.seq_len // longest
    batch_size = max(1, min(ROWS_AT_ONCE, fitting))
    found = held_out_losses(model, rows, pad_token_id=pad_token_id, batch_size=batch_size)
    print(f"held-out loss {when}: {found.mean:.4f} nats per token", flush=True)
    return found


def difference_of(before: RowLosses, after: RowLosses, *, run: Settings) -> str:
    """The second held-out loss less the first, with its interval, and what is to be known."""
    count = len(before.losses)
    if count < LEAST_ROWS:
        found = f"{after.mean - before.mean:+.3f} nats per token, no verdict from {count} rows"
    else:
        found = str(compare(before, after))
    lines = [f"difference: {found}"]
    if run.method == "qlora":
        lines.append("It holds both: what the adapters learnt, and what four bits cost.")
    if count < RELIABLE_ROWS:
        lines.append(f"Of {count} rows, too few to rely on: hold out {RELIABLE_ROWS} or more.")
    return "\n".join(lines)
