"""The data of `python -m recipes_lib finetune`: pairs read, checked, and a part of them held out."""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

from recipes_lib.core.data import load_instructions, load_pairs, tokenize_pair
from recipes_lib.fine_tuning.completion_only_loss import check_labels
from recipes_lib.workflows.finetune.loop import check_run
from recipes_lib.workflows.finetune.settings import Settings


def load_data(
    tokenizer: Any, *, run: Settings, held_out_file: str | None = None, limit: int | None = None
) -> tuple[list, list, list]:
    """Pairs to train on, their rows, and held-out rows: of `run.data_file`, or of the standard library without one.

    Without a file of held-out pairs, every tenth pair is held out. `limit` takes the first pairs only.
    Raises ValueError for what `load_instructions`, `check_labels` and `check_run` refuse, and for fewer than two
    held-out rows.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit}: give 1 or more, or leave it out for all pairs")
    if held_out_file and not run.data_file:
        raise ValueError(
            f"held_out_file={held_out_file}: give the file of pairs to train on as well"
        )
    if run.data_file:
        pairs = list(itertools.islice(load_pairs(dataset=str(run.data_file)), limit))
        held_out = pairs[::10]
        if held_out_file:
            held_out = list(load_pairs(dataset=held_out_file))
        else:
            pairs = [pair for i, pair in enumerate(pairs) if i % 10]
        known = set(map(json.dumps, held_out))  # what is trained on proves nothing
        repeated = [pair for pair in pairs if json.dumps(pair) in known]
        if repeated:
            print(f"left out, for they are held out too: {len(repeated)} pairs")
        pairs = [pair for pair in pairs if json.dumps(pair) not in known]
    else:  # long ones are left out here, and refused above: of these there are enough

        def some(split: str, count: int) -> list[dict[str, str]]:
            short = (
                p
                for p in load_pairs(split=split)
                if len(tokenize_pair(tokenizer, **p)["labels"]) <= run.seq_len
            )
            return list(itertools.islice(short, count))

        pairs, held_out = (
            some("train", limit or 400),
            some("validation", max(2, (limit or 400) // 8)),
        )
    every = {"max_tokens": sys.maxsize}
    rows = list(load_instructions(tokenizer, dataset=pairs, **every)) if pairs else []
    held_out = list(load_instructions(tokenizer, dataset=held_out, **every)) if held_out else []
    check_run(
        rows, run=run, folder=None, resume=False
    )  # before packing hides which row is too long
    check_labels(rows, tokenizer)
    if len(held_out) < 2:
        raise ValueError(
            f"{len(held_out)} held-out rows: give 20 pairs or more, or a file of held-out ones"
        )
    return pairs, rows, held_out
