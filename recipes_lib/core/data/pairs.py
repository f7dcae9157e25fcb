"""Pairs, conversations and texts, from wherever they stand.

    placed_pairs        as text, each with the place where it stands, for messages about it
    load_pairs          as text, without those that are empty
    load_instructions   as rows of tokens and labels

Without a data set they are functions of the standard library with their docstrings.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from recipes_lib.core.checks import check_choice
from recipes_lib.core.data.corpus import SPLITS, docstring_pairs
from recipes_lib.core.data.pair_columns import Pair, pair_of, with_known_names
from recipes_lib.core.data.row_sources import placed_rows
from recipes_lib.core.data.tokens_and_labels import Row, tokenize_chat, tokenize_pair, tokenize_text
from recipes_lib.core.data.turns import is_learnt

# --- as text --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlacedPair:
    """A pair, a conversation or a text, with words for people about it.

    Its place is "pairs.jsonl, line 7"; the columns that it was taken from, "" for the usual ones.
    """

    place: str
    pair: Pair
    columns: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to learn: no completion, no text, or no turn to be learnt."""
        if "messages" in self.pair:
            answers = [turn for turn in self.pair["messages"] if turn["role"] == "assistant"]
            return bool(answers) and not any(map(is_learnt, self.pair["messages"]))
        return not self.pair.get("text", self.pair.get("completion")).strip()


def placed_pairs(
    *,
    split: str = "train",
    dataset: str | Iterable[dict] | None = None,
    columns: Mapping[str, str] | None = None,
) -> Iterator[PlacedPair]:
    """All pairs of a `dataset` (see `load_instructions`), also those that are empty.

    `columns` gives `prompt` and `completion` by the names that they have in the data. An error
    about a pair begins with its place.
    """
    check_choice(SPLITS, split=split)
    if dataset is None:
        for number, pair in enumerate(docstring_pairs(split)):
            yield PlacedPair(f"function {number} of the standard library", pair)
        return
    for place, row in placed_rows(dataset, split=split):
        try:
            if columns:
                row = with_known_names(row, columns)
            pair, words = pair_of(row)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        yield PlacedPair(place, pair, words)


def load_pairs(
    *, split: str = "train", dataset: str | Iterable[dict] | None = None
) -> Iterator[Pair]:
    """The pairs of a `dataset` (see `load_instructions`); a warning counts those that are empty."""
    empty = 0
    for placed in placed_pairs(split=split, dataset=dataset):
        if placed.is_empty:
            empty += 1
        else:
            yield placed.pair
    if empty:
        warnings.warn(f"left out, for their completion is empty: {empty} pairs", stacklevel=2)


# --- as tokens and labels -------------------------------------------------------------------------


def load_instructions(
    tokenizer: Any,
    *,
    split: str = "train",
    max_tokens: int = 512,
    limit: int | None = None,
    dataset: str | Iterable[dict[str, str]] | None = None,
) -> Any:
    """Tokenized instruction pairs as a `datasets.Dataset` with columns `input_ids` and `labels`.

    Their order is the same on every machine with this Python.

    Args:
        split: "train" or "validation". A file or an iterable has only the first: the same rows
            would be trained on and held out.
        max_tokens: longer pairs are left out, never cut: a cut answer teaches to stop anywhere.
        limit: how many rows at most.
        dataset: None for the standard library. Else rows with `prompt` and `completion`, with
            `messages` (turns with `role` and `content`), or with `text`: an iterable, a local file,
            or a hub id.
    """
    from datasets import Dataset

    rows: list[Row] = []
    for pair in load_pairs(split=split, dataset=dataset):
        try:
            found = rows_of(tokenizer, pair, length=max_tokens)
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


def rows_of(tokenizer: Any, pair: Pair, *, length: int | None = None) -> list[Row]:
    """The rows of one pair, conversation or text; a text becomes rows of `length` tokens."""
    if "messages" in pair:
        return tokenize_chat(tokenizer, pair["messages"], pair.get("tools"))
    if "text" in pair:
        return tokenize_text(tokenizer, pair["text"], length=length)
    return [tokenize_pair(tokenizer, **pair)]
