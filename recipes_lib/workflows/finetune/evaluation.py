"""The held-out loss of a run, before and after: of what, in which precision, and how far it is.

evaluation = Evaluation(held_out, run=settings, pad_token_id=0)
before = evaluation.losses(model, "before", what="the base in bf16")
after = evaluation.losses(adapted, "after", what="the base in 4 bits with adapters in fp32")
print(evaluation.difference(before, after))
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from recipes_lib.core.data.chat import Row
from recipes_lib.fine_tuning.honest_evaluation import RowLosses, compare, held_out_losses
from recipes_lib.workflows.finetune.settings import PRECISIONS, Settings

RELIABLE_ROWS = 30  # held out; with fewer the interval is too narrow
ROWS_AT_ONCE = 8  # in one forward pass, where they are short
ROWS_OF_A_PART = 32  # after which the terminal says how far it is

Announce = Callable[[str], None]  # takes a few words on what is going on now


def say_nothing(words: str) -> None:
    """What is announced where nobody listens."""


# --- the losses -----------------------------------------------------------------------------------


class Evaluation:
    """Held-out rows, and how they are measured: for every model in the same batches.

    A batch holds at most as many tokens as a micro-batch of the training, so that it fits where
    the training fits.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        run: Settings,
        pad_token_id: int,
        announce: Announce = say_nothing,
    ) -> None:
        self.rows = rows
        self.method = run.method
        self.pad_token_id = pad_token_id
        self.announce = announce
        longest = max(len(row["input_ids"]) for row in rows)
        fitting = run.micro_batch_size * run.seq_len // longest
        self.batch_size = max(1, min(ROWS_AT_ONCE, fitting))

    def losses(self, model: Any, when: str, *, what: str) -> RowLosses:
        """The loss of each row. Prints their mean, and before that, that they are measured.

        Args:
            when: "before" or "after".
            what: the model in words, with its precision.
        """
        count = len(self.rows)
        print(f"measuring the held-out loss {when}, of {count} rows", flush=True)
        parts = []
        began = time.perf_counter()
        for start in range(0, count, ROWS_OF_A_PART):
            rest = ""
            if start > 0:
                seconds = (time.perf_counter() - began) / start * (count - start)
                rest = f", {in_words(seconds)} left"
            self.announce(f"held-out loss {when}: {start} of {count} rows done{rest}")
            part = self.rows[start : start + ROWS_OF_A_PART]
            parts.append(
                held_out_losses(
                    model, part, pad_token_id=self.pad_token_id, batch_size=self.batch_size
                )
            )
        found = RowLosses(
            torch.cat([part.losses for part in parts]), torch.cat([part.targets for part in parts])
        )
        print(f"held-out loss {when}: {found.mean:.4f} nats per token, {what}", flush=True)
        return found

    def difference(self, before: RowLosses, after: RowLosses) -> str:
        """The second loss less the first, with its interval, and what has to be known of it."""
        lines = [f"difference: {compare(before, after)}"]
        if self.method == "qlora":
            lines.append("It holds both: what the adapters learnt, and what four bits cost.")
        if len(self.rows) < RELIABLE_ROWS:
            lines.append(
                f"Of {len(self.rows)} rows, too few to rely on: hold out {RELIABLE_ROWS} or more."
            )
        return "\n".join(lines)


# --- words ----------------------------------------------------------------------------------------


def precision_of_base(model: Any) -> str:
    """The base, and the type of its weights: "the base in bf16"."""
    return f"the base in {_name_of(model.dtype)}"


def precision_of_result(model: Any, run: Settings) -> str:
    """What was trained, and the types of its weights."""
    if run.method == "full":
        return f"all weights in {_name_of(model.dtype)}"
    adapters = next(p.dtype for p in model.parameters() if p.requires_grad)
    base = _name_of(model.dtype)
    if run.method == "qlora":
        base = "4 bits"
    return f"the base in {base} with adapters in {_name_of(adapters)}"


def _name_of(dtype: torch.dtype) -> str:
    names = {kind: name for name, kind in PRECISIONS.items()}
    return names.get(dtype, str(dtype))


def in_words(seconds: float) -> str:
    """A length of time for people: 45 s, 12 min, 3 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"
