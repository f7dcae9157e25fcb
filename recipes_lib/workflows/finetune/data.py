"""The data of a fine-tuning run: pairs, conversations or texts, and a part of them held out.

    data = load_data(tokenizer, run=settings)
    data.rows, data.held_out          # tokens and labels
    data.run                          # the settings, with the length that was found

Every message about a pair names the place where it stands: the line of the user's file, and not a
number that the split has given it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes_lib.core.data import PlacedPair, load_pairs, placed_pairs, rows_of
from recipes_lib.core.data.chat_template import CHATML, written_behind
from recipes_lib.core.data.pair_columns import Pair
from recipes_lib.core.data.tokens_and_labels import (
    IGNORED,
    Row,
    beginning,
    learnt_ends,
    tokenize_pair,
)
from recipes_lib.core.model import load_tokenizer
from recipes_lib.core.model.vocabulary import add_tokens
from recipes_lib.fine_tuning.completion_only_loss import check_labels
from recipes_lib.workflows.finetune.settings import Settings

HELD_OUT_EVERY = 10  # the first of every ten pairs
FEW = 20  # texts of a run, of which parts are held out instead
SHOWN = 160  # characters of what a run learns of its first pair
DEFAULT_LIMIT = 400  # pairs of the standard library


@dataclasses.dataclass(frozen=True)
class Data:
    """What a fine-tuning run trains on, and what it keeps out.

    `run` is the settings with the length of the longest row, where that was asked for.
    """

    pairs: list[Pair]  # to train on, as text
    rows: list[Row]  # the same, as tokens
    held_out: list[Row]
    run: Settings
    ends: list[int] = dataclasses.field(default_factory=list)  # tokens with which rows end


@dataclasses.dataclass(frozen=True)
class _TokenizedPair:
    """A pair with its place and its rows: some templates make several of one conversation."""

    place: str
    pair: Pair
    rows: list[Row]

    @property
    def length(self) -> int:
        """Tokens of the longest of its rows."""
        return max(len(row["input_ids"]) for row in self.rows)


def load_data(
    tokenizer: Any,
    *,
    run: Settings,
    held_out_file: str | None = None,
    limit: int | None = None,
    longest: bool = False,
    drop_long: bool = False,
    columns: Mapping[str, str] | None = None,
) -> Data:
    """The data of a run: pairs to train on, their rows, held-out rows. Prints what it leaves out.

    They are those of `run.data_files`, or of the standard library without one. Without a file of
    held-out pairs, every tenth pair is held out; of a few long texts, every tenth part.

    Args:
        limit: take the first pairs only.
        longest: set `seq_len` to the length of the longest row, held out or not.
        drop_long: leave out the rows that are longer than `run.seq_len`.
        columns: `prompt` and `completion` by the names that they have in the data.
    Raises ValueError for what `placed_pairs` and `check_labels` refuse, for a row that is too long,
    for no row to train on, and for fewer than two held-out rows.
    """
    length = None if longest else run.seq_len  # of a part of a text
    if run.data_files:
        trained, held_out = _pairs_of_files(tokenizer, run, held_out_file, limit, length, columns)
    elif held_out_file or longest or columns:
        raise ValueError(
            "held-out pairs, columns and --seq-len auto need pairs to train on: give --data"
        )
    else:
        found = _pairs_of_standard_library(tokenizer, run, limit)
        trained, held_out = (_tokenize_pairs(tokenizer, pairs, length) for pairs in found)

    # Checked before packing, which would hide which row is too long.
    if longest:
        run = dataclasses.replace(run, seq_len=_length_of_the_longest([*trained, *held_out]))
    long = _long_ones([*trained, *held_out], run.seq_len)
    if long and not drop_long:
        raise ValueError(
            f"{long}. --seq-len auto holds all of them, --drop-long leaves them out; "
            f"they are not cut, because a cut answer teaches to stop anywhere"
        )
    if long:
        print(f"left out: {long}")
        trained = [each for each in trained if each.length <= run.seq_len]
        held_out = [each for each in held_out if each.length <= run.seq_len]

    rows = [row for each in trained for row in each.rows]
    held_out_rows = [row for each in held_out for row in each.rows]
    if not rows or len(held_out_rows) < 2:  # nothing to learn, or no interval
        raise ValueError(
            f"{len(rows)} rows to train on and {len(held_out_rows)} held-out rows: give "
            f"20 pairs or more, or a file of held-out ones"
        )
    for each in [*trained, *held_out]:
        if "text" not in each.pair:  # a text may hold marks of a template, and they are learnt
            check_labels(each.rows, tokenizer, place=each.place)
    print(f"learnt of {trained[0].place}: {_learnt_text(tokenizer, trained[0])}")
    ends = learnt_ends(tokenizer, [each.rows[-1] for each in trained])
    if not ends:
        print(_without_an_end(tokenizer, trained[0]))
    return Data([each.pair for each in trained], rows, held_out_rows, run, ends)


def _without_an_end(tokenizer: Any, pair: _TokenizedPair) -> str:
    """What a fine-tuning run says where no answer ends with a token."""
    answer = pair.pair.get("completion", pair.pair.get("text", ""))
    if "messages" in pair.pair:
        answer = pair.pair["messages"][-1]["content"] or ""
    written = written_behind({"content": answer}, tokenizer.decode(pair.rows[-1]["input_ids"]))
    if written:
        return (
            f"no end mark: answers end with {written!r}, which is no token of the tokenizer, so "
            f"the model will write on until it is cut: --add-token '{written}' makes it one"
        )
    return (
        "no end mark: neither the chat template nor the tokenizer ends an answer, so the model "
        "will write on until it is cut: give the tokenizer an eos_token, or take "
        "--chat-template chatml --add-token '<|im_start|>' --add-token '<|im_end|>'"
    )


def tokenizer_of(run: Settings) -> tuple[Any, dict[str, int]]:
    """For the data of a run: the base's tokenizer with its template and tokens, and their ids."""
    tokenizer = load_tokenizer(run.base_model)
    if run.chat_template == "chatml":
        # A base that has seen no text without <bos> gets it here, too.
        begins = "{{ bos_token }}" if tokenizer.bos_token_id in beginning(tokenizer) else ""
        tokenizer.chat_template = begins + CHATML
    elif run.chat_template:
        file = Path(run.chat_template).expanduser()
        if not file.is_file():
            raise ValueError(f"chat_template={run.chat_template!r}: give 'chatml', or a file")
        tokenizer.chat_template = file.read_text(encoding="utf-8")
    return tokenizer, add_tokens(tokenizer, run.add_tokens)


# --- pairs ----------------------------------------------------------------------------------------


def _pairs_of_files(
    tokenizer: Any,
    run: Settings,
    held_out_file: str | None,
    limit: int | None,
    length: int | None,
    columns: Mapping[str, str] | None,
) -> tuple[list[_TokenizedPair], list[_TokenizedPair]]:
    """The pairs of a run to train on, and those held out: what is trained on proves nothing."""
    files = [placed_pairs(dataset=file, columns=columns) for file in run.data_files]
    read = itertools.chain.from_iterable(files)
    placed = _with_an_answer(itertools.islice(read, limit))
    held_out_placed = []
    if held_out_file:
        held_out_placed = _with_an_answer(placed_pairs(dataset=held_out_file, columns=columns))
    found = [each.columns for each in [*placed, *held_out_placed] if each.columns]
    for words in dict.fromkeys(found):
        print(f"columns: {words}")
    pairs = _tokenize_pairs(tokenizer, placed, length)
    held_out = _tokenize_pairs(tokenizer, held_out_placed, length)
    if not held_out_file:
        if len(pairs) < FEW and all("text" in each.pair for each in pairs):
            pairs = [part for each in pairs for part in _parts_of_text(tokenizer, each)]
        held_out = pairs[::HELD_OUT_EVERY]
        pairs = [pair for i, pair in enumerate(pairs) if i % HELD_OUT_EVERY != 0]

    # The same pair may stand in the file twice, or in both files.
    known = {json.dumps(each.pair) for each in held_out}
    others = [each for each in pairs if json.dumps(each.pair) not in known]
    if not others:
        raise ValueError("no pair is left to train on: each is held out, too")
    if len(others) < len(pairs):
        print(f"left out, for they are held out too: {len(pairs) - len(others)} pairs")
    return others, held_out


def _parts_of_text(tokenizer: Any, text: _TokenizedPair) -> list[_TokenizedPair]:
    """Each row of a run's text by itself, so that some of a single book can be held out."""
    parts = []
    for number, row in enumerate(text.rows):
        words = tokenizer.decode(row["input_ids"], skip_special_tokens=True)
        parts.append(_TokenizedPair(f"{text.place}, part {number}", {"text": words}, [row]))
    return parts


def _learnt_text(tokenizer: Any, pair: _TokenizedPair) -> str:
    """What carries loss in a run's pair, as text."""
    targets = [label for row in pair.rows for label in row["labels"] if label != IGNORED]
    text = repr(tokenizer.decode(targets))
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _with_an_answer(pairs: Iterable[PlacedPair]) -> list[PlacedPair]:
    """The pairs of a run from which something is learnt. Prints how many are left out."""
    pairs = list(pairs)
    empty = [each.place for each in pairs if each.is_empty]
    if empty:
        print(
            f"left out, for there is nothing to learn (an empty completion, or no answer that is "
            f"learnt): {len(empty)} pairs, the first of them {empty[0]}"
        )
    return [each for each in pairs if not each.is_empty]


def _pairs_of_standard_library(
    tokenizer: Any, run: Settings, limit: int | None
) -> tuple[list[PlacedPair], list[PlacedPair]]:
    """Pairs of at most `run.seq_len` tokens.

    Longer ones of a user's file are refused; of these there are enough.
    """
    count = DEFAULT_LIMIT if limit is None else limit
    found = []
    for split, wanted in {"train": count, "validation": max(2, count // 8)}.items():
        pairs = load_pairs(split=split)
        short = (p for p in pairs if len(tokenize_pair(tokenizer, **p)["labels"]) <= run.seq_len)
        chosen = itertools.islice(short, wanted)
        found.append([PlacedPair(f"{split} function {i}", pair) for i, pair in enumerate(chosen)])
    train, validation = found
    return train, validation


# --- rows, and how long they are ------------------------------------------------------------------


def _tokenize_pairs(
    tokenizer: Any, pairs: Sequence[PlacedPair], length: int | None
) -> list[_TokenizedPair]:
    """The pairs of a run with their rows; an error says where the pair stands."""
    found = []
    for each in pairs:
        try:
            rows = rows_of(tokenizer, each.pair, length=length)
        except ValueError as error:
            raise ValueError(f"{each.place}: {error}") from error
        found.append(_TokenizedPair(each.place, each.pair, rows))
    return found


def _length_of_the_longest(pairs: Sequence[_TokenizedPair]) -> int:
    """Tokens of a run's longest row; prints which it is: it can be far from the others."""
    by_length = sorted(pairs, key=lambda each: each.length)
    longest = by_length[-1]
    print(
        f"seq_len {longest.length:,}: the longest row is {longest.place}; "
        f"half of the rows have at most {by_length[len(pairs) // 2].length:,} tokens"
    )
    return longest.length


def _long_ones(pairs: Sequence[_TokenizedPair], seq_len: int) -> str:
    """A run's rows of more than `seq_len` tokens in words, held out or not: they take memory."""
    long = [each for each in pairs if each.length > seq_len]
    if not long:
        return ""
    longest = max(long, key=lambda each: each.length)
    return (
        f"{len(long)} of {len(pairs)} rows are longer than seq_len={seq_len}; the longest is "
        f"{longest.place} with {longest.length:,} tokens"
    )
