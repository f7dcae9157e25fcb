"""Real text without a download: Python's own standard library.

`load_instructions` gives instruction pairs (a function's source → its docstring), formatted by the
model's chat template (`chat.py`), with the loss on the answer only. `load_text` gives long running
text. Both are split by *module*, so no module is in training and in validation. A data set of the
hub, a local file (`row_files.py`) or a list of pairs takes the same way. Its columns may have any
of the names in `pair_columns.py`.

chat  pairs and conversations as tokens and labels, by the model's own template
corpus  Python's own standard library as text and as instruction pairs
evaluation  losses, perplexity and answers on rows that were not trained on
images  5,000 handwritten digits, to train on and to test with
pair_columns  a row as a pair or a conversation, whatever its columns are called
row_files  rows of a local file or folder, whatever its format, each with its place
row_order  the rows that a step trains on, as a function of the step alone
token_ids  token ids as users give them, checked before a model reads them
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recipes_lib.core.checks import check_choice, check_whole
from recipes_lib.core.data.chat import IGNORED, Row, tokenize_chat, tokenize_pair
from recipes_lib.core.data.corpus import docstring_pairs, modules
from recipes_lib.core.data.pair_columns import Pair, pair_of
from recipes_lib.core.data.row_files import read_rows

SPLITS = ("train", "validation")
DATA_FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".gz", ".txt")

Batch = dict[str, torch.Tensor]  # `input_ids` and `labels`, each [B, S]


# --- from text to rows ----------------------------------------------------------------------------


def load_text(*, split: str = "train") -> str:
    """The sources of the standard library as one long text, module after module."""
    check_choice(SPLITS, split=split)
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in modules(split)]
    return "\n\n".join(texts)


def load_instructions(
    tokenizer: Any,
    *,
    split: str = "train",
    max_tokens: int = 512,
    limit: int | None = None,
    dataset: str | Iterable[dict[str, str]] | None = None,
) -> Any:
    """Tokenized instruction pairs as a `datasets.Dataset` with columns `input_ids` and `labels`.

    Args:
        split: "train" or "validation".
        max_tokens: pairs that are longer are left out, never cut: a cut answer teaches to stop
            anywhere.
        limit: how many rows at most. The order is shuffled once, the same on every machine with
            this Python.
        dataset: None for the standard library. Else rows with `prompt` and `completion`, or with
            `messages` (turns with `role` and `content`): an iterable, a local file or folder, or a
            hub id (needs the hub).
    Raises ValueError for an unknown split, sizes below 1, and no pair left. It raises one for
    another split than "train" of a file or an iterable, too: they have none, and the same rows
    would be trained on and held out.
    """
    from datasets import Dataset

    check_whole(max_tokens=max_tokens)
    if limit is not None:
        check_whole(limit=limit)
    rows: list[Row] = []
    for pair in load_pairs(split=split, dataset=dataset):
        try:
            found = rows_of(tokenizer, pair)
        except ValueError as error:
            raise ValueError(f"{error} (in {str(pair)[:100]})") from error
        rows += [row for row in found if len(row["input_ids"]) <= max_tokens]
        if limit is not None and len(rows) >= limit:
            break
    if not rows:
        raise ValueError(
            f"no pair is left in split {split!r}: each is empty or longer than "
            f"max_tokens={max_tokens}; raise max_tokens, or check that the data set has text in "
            f"`prompt` and `completion`"
        )
    return Dataset.from_list(rows[:limit])


def rows_of(tokenizer: Any, pair: Pair) -> list[Row]:
    """The rows of one pair or conversation; several where the template rewrites earlier turns.

    Raises ValueError for what cannot be learnt, as an empty answer.
    """
    if "messages" in pair:
        return tokenize_chat(tokenizer, pair["messages"])
    return [tokenize_pair(tokenizer, **pair)]


@dataclass(frozen=True)
class PlacedPair:
    """A pair or conversation, the place where it stands, and the columns that it was taken from.

    Both are words for people: "pairs.jsonl, line 7", and "" for the usual columns.
    """

    place: str
    pair: Pair
    columns: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether a pair has no completion, so that there is nothing to learn from it."""
        return "messages" not in self.pair and not self.pair["completion"].strip()


def load_pairs(
    *, split: str = "train", dataset: str | Iterable[dict] | None = None
) -> Iterator[Pair]:
    """The pairs of `load_instructions`, with its errors, as text.

    Pairs with an empty completion are left out, and a warning counts them.
    """
    empty = 0
    for placed in placed_pairs(split=split, dataset=dataset):
        if placed.is_empty:
            empty += 1
        else:
            yield placed.pair
    if empty:
        warnings.warn(f"left out, for their completion is empty: {empty} pairs", stacklevel=2)


def placed_pairs(
    *, split: str = "train", dataset: str | Iterable[dict] | None = None
) -> Iterator[PlacedPair]:
    """The pairs of `load_instructions`, each with its place, also those that are empty.

    An error about a pair begins with its place.
    """
    check_choice(SPLITS, split=split)
    if dataset is None:
        for number, pair in enumerate(docstring_pairs(split)):
            yield PlacedPair(f"function {number} of the standard library", pair)
        return
    for place, row in _placed_rows(dataset, split):
        try:
            pair, columns = pair_of(row)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        yield PlacedPair(place, pair, columns)


def _placed_rows(dataset: str | Iterable[dict], split: str) -> Iterator[tuple[str, Any]]:
    if isinstance(dataset, str) and not _is_a_path(dataset):
        for number, row in enumerate(_read_hub(dataset, split)):
            yield f"{dataset}, row {number} (from 0)", row
        return
    if split != "train":
        raise ValueError(
            f"split={split!r}: these pairs have no splits: "
            f"give the held-out ones as a data set of their own"
        )
    if isinstance(dataset, str):
        yield from read_rows(dataset)
        return
    for number, row in enumerate(dataset):
        yield f"row {number} (from 0)", row


def _is_a_path(name: str) -> bool:
    """Whether `name` is a file or a folder, or can be nothing else.

    A name of the hub has at most one slash, and no ending of a data file.
    """
    path = Path(name).expanduser()
    if path.exists():
        return True
    return path.is_absolute() or name.count("/") > 1 or path.suffix in DATA_FILES


def _read_hub(name: str, split: str) -> Iterable[Any]:
    from datasets import load_dataset

    try:
        return load_dataset(name, split=split)
    except Exception as error:  # of many types: a missing name, split, network or token
        raise ValueError(
            f"cannot load split {split!r} of the data set {name!r} ({error}): give the path of a "
            f"file with `prompt` and `completion`, or a hub id that this machine can reach"
        ) from error


# --- from rows to batches -------------------------------------------------------------------------


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
    Raises ValueError for a length that does not hold the longest, and for a row that `check_rows`
    refuses: without one label for each token, packed or padded already.
    """
    rows = list(rows)
    check_rows(rows)
    longest = max(len(row["input_ids"]) for row in rows)
    if length is None:
        length = longest
    check_whole(least=longest, length=length)

    def padded(column: str, fill: int) -> torch.Tensor:  # [B, S]
        values = [row[column] for row in rows]
        return torch.tensor(
            [[*value, *[fill] * (length - len(value))] for value in values], device=device
        )

    return {
        "input_ids": padded("input_ids", pad_token_id),
        "labels": padded("labels", IGNORED),
    }


def check_rows(rows: Sequence[Row]) -> None:
    """Raise ValueError for a row that has not one label for each token, or has borders inside.

    Padded or packed, its labels would stand beside the tokens of another document, or what it says
    of its own documents and padding would be dropped without a word.
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
    """Whether the row has padding that a token reads or that is learned.

    Behind the last token it is neither, if its labels are ignored: no token reads what follows it.
    """
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
