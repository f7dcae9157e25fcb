"""The data of a fine-tuning run: pairs read, checked, and a part of them held out."""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

from recipes_lib.core.chat import Row, tokenize_pair
from recipes_lib.core.checks import check_whole
from recipes_lib.core.data import load_instructions, load_pairs
from recipes_lib.fine_tuning.completion_only_loss import check_labels
from recipes_lib.workflows.finetune.loop import check_run
from recipes_lib.workflows.finetune.settings import Settings

Pair = dict[str, Any]  # `prompt` and `completion`, or `messages`
HELD_OUT_EVERY = 10  # the first of every ten pairs
DEFAULT_LIMIT = 400  # pairs of the standard library


def load_data(
    tokenizer: Any, *, run: Settings, held_out_file: str | None = None, limit: int | None = None
) -> tuple[list[Pair], list[Row], list[Row]]:
    """Pairs to train on, their rows, and held-out rows.

    They are those of `run.data_file`, or of the standard library if it is "". Without a file of
    held-out pairs, every tenth pair is held out.

    Args:
        limit: take the first pairs only.
    Raises ValueError for what `load_instructions`, `check_labels` and `check_run` refuse, and for
    fewer than two held-out rows.
    """
    if limit is not None:
        check_whole(limit=limit)
    if run.data_file:
        pairs, held_out_pairs = _pairs_of_file(run, held_out_file, limit)
    elif held_out_file:
        raise ValueError(
            f"held_out_file={held_out_file}: give the file of pairs to train on as well"
        )
    else:
        pairs, held_out_pairs = _pairs_of_standard_library(tokenizer, run, limit)

    # Checked before packing, which would hide which row is too long.
    rows = _rows_of(tokenizer, pairs)
    held_out = _rows_of(tokenizer, held_out_pairs)
    check_run(rows, run=run, folder=None, resume=False)
    check_labels(rows, tokenizer)
    if len(held_out) < 2:
        raise ValueError(
            f"{len(held_out)} held-out rows: give 20 pairs or more, or a file of held-out ones"
        )
    return pairs, rows, held_out


def _pairs_of_file(
    run: Settings, held_out_file: str | None, limit: int | None
) -> tuple[list[Pair], list[Pair]]:
    """Pairs to train on, and pairs held out: what is trained on proves nothing."""
    pairs = list(itertools.islice(load_pairs(dataset=str(run.data_file)), limit))
    if held_out_file:
        held_out = list(load_pairs(dataset=held_out_file))
    else:
        held_out = pairs[::HELD_OUT_EVERY]
        pairs = [pair for i, pair in enumerate(pairs) if i % HELD_OUT_EVERY != 0]

    # The same pair may stand in the file twice, or in both files.
    known = {json.dumps(pair) for pair in held_out}
    others = [pair for pair in pairs if json.dumps(pair) not in known]
    if len(others) < len(pairs):
        print(f"left out, for they are held out too: {len(pairs) - len(others)} pairs")
    return others, held_out


def _pairs_of_standard_library(
    tokenizer: Any, run: Settings, limit: int | None
) -> tuple[list[Pair], list[Pair]]:
    """Pairs of at most `run.seq_len` tokens.

    Longer ones of a user's file are refused; of these there are enough.
    """
    count = limit
    if count is None:
        count = DEFAULT_LIMIT
    # Below two held-out rows there is no interval.
    counts = {"train": count, "validation": max(2, count // 8)}
    found = []
    for split, wanted in counts.items():
        pairs = load_pairs(split=split)
        short = (p for p in pairs if len(tokenize_pair(tokenizer, **p)["labels"]) <= run.seq_len)
        found.append(list(itertools.islice(short, wanted)))
    train, validation = found
    return train, validation


def _rows_of(tokenizer: Any, pairs: list[Pair]) -> list[Row]:
    """All pairs as rows, whatever their length: a long one is refused by name, not left out."""
    if not pairs:
        return []
    return list(load_instructions(tokenizer, dataset=pairs, max_tokens=sys.maxsize))
