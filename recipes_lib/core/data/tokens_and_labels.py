"""Pairs, conversations and texts as tokens and labels, formatted by the model's own chat template.

    tokens   <user> Add 1 and 2 </user> <assistant>  3   </assistant>
    labels     -     -  -  -  -    -         -       3   </assistant>

A label stands at its own token, and IGNORED (-100) where there is nothing to learn. The labels are
*not* shifted: Hugging Face models shift them inside, and doing it twice is a silent bug.

What is learnt is the content of the turns to be learnt, and the template's own marks behind them;
`chat_template.py` compares the text with what was given.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence
from typing import Any

from recipes_lib.core.data.chat_template import render, written, written_behind
from recipes_lib.core.data.turns import Turn, is_learnt

IGNORED = -100  # the label that the loss leaves out

Row = dict[str, list[int]]  # `input_ids` and `labels`, of one length


def tokenize_pair(tokenizer: Any, prompt: str, completion: str) -> Row:
    """One chat-formatted pair; labels are IGNORED on everything but the answer and its end mark."""
    chat = [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": completion},
    ]
    return tokenize_chat(tokenizer, chat)[0]


def tokenize_chat(
    tokenizer: Any, messages: Sequence[Turn], tools: list[dict[str, Any]] | None = None
) -> list[Row]:
    """A conversation as rows, with the loss on every answer to be learnt and its end mark.

    It is one row if the template leaves earlier turns as they were. Some rewrite them: Qwen3 drops
    the thinking of earlier answers. Then each answer is a row of its own, after the history that
    the model will see in use. Without a template, a question and its answer are a row, after the
    tokens with which the tokenizer begins a text.

    Args:
        messages: turns as `turns_of` returns them.
        tools: that the turns may call, as OpenAI writes them.
    """
    messages = [{"content": None} | turn for turn in messages]
    places = _turns_with_labels(messages)
    turns, answers = written(tokenizer, messages, tools, places=places)
    rows: list[Row] = []
    marks: dict[int, str] = {}  # what ends each row
    done = ""  # the text that the last row holds
    for place, (question, text) in zip(places, answers, strict=True):
        if not rows or not question.startswith(done):
            rows.append({"input_ids": [], "labels": []})
            done = ""
        before = rows[-1]["input_ids"]
        not_learnt, learnt = _new_tokens(tokenizer, before, done, question, text)
        rows[-1]["input_ids"] += not_learnt + learnt
        rows[-1]["labels"] += [IGNORED] * len(not_learnt) + learnt
        done = text
        marks[len(rows)] = written_behind(messages[place], text)
    for row, mark in zip(rows, marks.values(), strict=True):
        if not mark:
            _end_mark_behind(tokenizer, row)
    if places[-1] + 1 < len(messages):  # turns behind what is learnt
        whole = render(tokenizer, turns, tools).rstrip("\n")
        if whole.startswith(done):
            more = _ids(tokenizer, whole[len(done) :])
            rows[-1]["input_ids"] += more
            rows[-1]["labels"] += [IGNORED] * len(more)
    if not getattr(tokenizer, "chat_template", None):
        return [_begun(tokenizer, row) for row in rows]
    return rows


def tokenize_text(tokenizer: Any, text: str, *, length: int | None = None) -> list[Row]:
    """A text without a question, all of it learnt, with the marks of its beginning and end.

    Longer ones become rows of `length` tokens, one after the other.
    """
    ids = _ids(tokenizer, text)
    end = tokenizer.eos_token_id
    if end is not None and ids[-1:] != [end]:
        ids = [*ids, end]
    row = _begun(tokenizer, {"input_ids": ids, "labels": list(ids)})
    if length is None:
        length = len(row["labels"])
    rows = []
    for start in range(0, len(row["labels"]), max(1, length)):
        rows.append({name: values[start : start + length] for name, values in row.items()})
    # Of a last token alone nothing is learnt.
    rows = [part for part in rows if len(part["labels"]) > 1]
    if not rows:
        raise ValueError(f"nothing to learn from a text of one token, {text!r}: leave it out")
    return rows


def _turns_with_labels(messages: Sequence[Turn]) -> list[int]:
    """Which turns get labels; ValueError if there is nothing to learn from them."""
    roles = [message["role"] for message in messages]
    places = [place for place, turn in enumerate(messages) if is_learnt(turn)]
    empty = [place for place in places if _is_empty(messages[place])]
    if not places or empty:
        raise ValueError(
            f"nothing to learn: an empty answer, or no 'assistant' that is learnt in {roles}"
        )
    if messages[places[0]]["role"] == "assistant" and places[0] == 0:
        raise ValueError(
            "the conversation begins with an answer: "
            "give the message before it, of `user` or `system`"
        )
    return places


def _is_empty(turn: Turn) -> bool:
    return not str(turn["content"] or "").strip() and not turn.get("tool_calls")


def _new_tokens(
    tokenizer: Any, before: list[int], done: str, question: str, text: str
) -> tuple[list[int], list[int]]:
    """The tokens that `text` adds to a row of `before`: those up to the answer, and its own."""
    # Tokens of the whole text, as generation sees them: SentencePiece puts a space before a piece
    # that stands alone.
    asked = _ids(tokenizer, question)
    answered = _ids(tokenizer, text)
    borders_hold = asked[: len(before)] == before and answered[: len(asked)] == asked
    if borders_hold:
        return asked[len(before) :], answered[len(asked) :]
    # A token reaches over the border between question and answer: cut the text there.
    return _ids(tokenizer, question[len(done) :]), _ids(tokenizer, text[len(question) :])


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


# --- where a text begins and ends -----------------------------------------------------------------


def beginning(tokenizer: Any) -> list[int]:
    """The tokens that the tokenizer puts before a text of rows and labels, as <bos>."""
    plain = _ids(tokenizer, "a")
    marked = tokenizer("a")["input_ids"]
    for count in range(len(marked) - len(plain) + 1):
        if marked[count : count + len(plain)] == plain:
            return marked[:count]
    return []


def _begun(tokenizer: Any, row: Row) -> Row:
    """A row behind the tokens of a beginning, which get no labels: no token predicts them."""
    begins = beginning(tokenizer)
    if row["input_ids"][: len(begins)] == begins:  # a text that has them already
        rest = row["labels"][len(begins) :]
        return {"input_ids": row["input_ids"], "labels": [IGNORED] * len(begins) + rest}
    return {
        "input_ids": begins + row["input_ids"],
        "labels": [IGNORED] * len(begins) + row["labels"],
    }


def _end_mark_behind(tokenizer: Any, row: Row) -> None:
    """The tokenizer's end mark behind a row whose template writes none: a text must end."""
    end = tokenizer.eos_token_id
    if end is not None:
        row["input_ids"].append(end)
        row["labels"].append(end)


def is_end_mark(tokenizer: Any, token: int) -> bool:
    """Whether a text can be stopped at this token: one of the tokenizer's own, and no letters."""
    return token in tokenizer.all_special_ids or token in tokenizer.added_tokens_decoder


def learnt_ends(tokenizer: Any, rows: Sequence[Row]) -> list[int]:
    """The tokens at which a model stops that has learnt `rows`: first that of most rows, and then
    those of answers inside, as calls of tools may have one of their own.

    Empty if no answer ends with a token of its own: such a model does not stop by itself.
    """
    last: collections.Counter[int] = collections.Counter()
    inside: collections.Counter[int] = collections.Counter()
    for row in rows:
        ends = [before for before, after in _borders_of(row["labels"]) if before != IGNORED]
        last.update(ends[-1:])
        inside.update(ends[:-1])
    in_order = [token for counts in (last, inside) for token, _ in counts.most_common()]
    return [token for token in dict.fromkeys(in_order) if is_end_mark(tokenizer, token)]


def _borders_of(labels: Sequence[int]) -> list[tuple[int, int]]:
    """Each label, with the next one, behind which nothing is learnt."""
    pairs = itertools.pairwise([*labels, IGNORED])
    return [(label, after) for label, after in pairs if after == IGNORED]


def decode_with_mask(row: Row, tokenizer: Any) -> str:
    """A row as text, with the parts that carry no loss between ⟦ and ⟧."""
    tokens_and_labels = zip(row["input_ids"], row["labels"], strict=True)
    parts = []
    for masked, part in itertools.groupby(tokens_and_labels, lambda pair: pair[1] == IGNORED):
        piece = tokenizer.decode([token for token, _ in part])
        if masked:
            piece = f"⟦{piece}⟧"
        parts.append(piece)
    return "".join(parts)
