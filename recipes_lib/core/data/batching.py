"""From rows to batches: right-padded, checked, one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from recipes_lib.core.checks import check_whole
from recipes_lib.core.data.tokens_and_labels import IGNORED, Row

Batch = dict[str, torch.Tensor]  # `input_ids` and `labels`, each [B, S]


def collate(
    rows: Iterable[Row],
    *,
    pad_token_id: int,
    length: int | None = None,
    device: str = "cpu",
) -> Batch:
    """Right-pad rows to the longest, or to `length`: `input_ids` and `labels`, each [B, S].

    There is no attention mask: a causal model never looks to the right, where the padding is, and
    without a mask attention takes its fast path and does not repeat the KV heads.
    """
    rows = list(rows)
    check_rows(rows)
    longest = max(len(row["input_ids"]) for row in rows)
    if length is None:
        length = longest
    check_whole(least=longest, length=length)

    def right_padded(column: str, fill: int) -> torch.Tensor:  # [B, S]
        values = [row[column] for row in rows]
        return torch.tensor(
            [[*value, *[fill] * (length - len(value))] for value in values], device=device
        )

    return {
        "input_ids": right_padded("input_ids", pad_token_id),
        "labels": right_padded("labels", IGNORED),
    }


def check_rows(rows: Sequence[Row]) -> None:
    """Raise ValueError for a row that no batch can take: unlike numbers of labels, packed, padded.

    What it says of its own documents and padding would be dropped without a word.
    """
    for number, row in enumerate(rows):
        if len(row["labels"]) != len(row["input_ids"]):
            raise ValueError(
                f"row {number} has {len(row['input_ids'])} tokens and {len(row['labels'])} labels: "
                f"give one label for each token, unshifted, {IGNORED} where there is no loss"
            )
        if "position_ids" in row:
            raise ValueError(
                f"row {number} is packed, and its documents would read each other: give "
                f"collate_packed what pack_sequences returned, and everything else rows that are "
                f"not packed"
            )
        if _reads_padding(row):
            raise ValueError(
                f"row {number} is padded (its attention_mask has zeros), and the padding would be "
                f"read as text: give the tokens without padding"
            )


def _reads_padding(row: Row) -> bool:
    """Whether a row for a batch has padding before a token, or padding that is learned."""
    mask = row.get("attention_mask")
    if mask is None:
        return False
    text_ends = max((place for place, here in enumerate(mask) if here), default=-1) + 1
    learned = any(label != IGNORED for label in row["labels"][text_ends:])
    return learned or not all(mask[:text_ends])


def batches(
    data: Any, *, batch_size: int, pad_token_id: int, length: int | None = None, device: str = "cpu"
) -> Iterator[Batch]:
    """Consecutive collated batches, over the data again and again: take as many as you need."""
    check_whole(batch_size=batch_size, most=len(data))
    while True:
        for start in range(0, len(data) - batch_size + 1, batch_size):
            rows = [data[i] for i in range(start, start + batch_size)]
            yield collate(rows, pad_token_id=pad_token_id, length=length, device=device)
