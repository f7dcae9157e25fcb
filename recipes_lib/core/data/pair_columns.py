"""A row of a data set as a pair, a conversation or a text, whatever its columns are called.

    pair, columns = pair_of({"question": "1 + 2?", "answer": "3"})
    pair       {"prompt": "1 + 2?", "completion": "3"}
    columns    "`question` is the prompt, `answer` is the completion"

Three forms come out:

    prompt, completion     two texts
    messages, tools        turns (`turns.py`), and the tools that they may call
    text                   a text without a question

Every column is used, or known to be unimportant, or repeats what is used, or is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recipes_lib.core.data.turns import (
    UNIMPORTANT,
    Turn,
    from_text,
    is_nothing,
    shown,
    tools_of,
    turns_of,
)

Pair = dict[str, Any]  # of columns: `prompt` and `completion`, or `messages` and `tools`, or `text`

# What a column is for, and its names in public data sets; the first that is there counts.
NAMES = {
    "messages": ("messages", "conversations", "conversation"),
    "prompt": ("prompt", "instruction", "question", "query", "problem", "input"),
    "completion": ("completion", "output", "answer", "response", "solution"),
    "rest of the prompt": ("input", "context"),  # Alpaca's and Dolly's
    "text": ("text",),
    "system": ("system", "system_prompt"),
    "history": ("history",),
    "tools": ("tools", "functions"),
}
NEEDED = (
    "the texts `prompt` and `completion` are needed (rename them), or `messages`, a list of turns "
    "with the texts `role` and `content`, or `text`"
)
# What some columns ask for that is not done here.
ELSEWHERE = {
    "this trains on texts alone": ("image", "images", "video", "videos", "audio", "audios"),
    "preferences are learnt by other means: trl.DPOTrainer, KTOTrainer or RewardTrainer, and "
    "trl.GRPOTrainer where a function gives the reward": (
        "chosen",
        "rejected",
        "rejected_response",
        "rejected_messages",
    ),
}


def pair_of(row: Any) -> tuple[Pair, str]:
    """The pair, conversation or text of a row, and which columns it was taken from, in words.

    The words are "" for the usual names. Raises ValueError for a row that has none of the columns
    above, or others too.
    """
    if not isinstance(row, dict):
        raise ValueError(f"a row is {shown(row)}; {NEEDED}")
    columns = _Columns(row)
    _refuse_columns_for_elsewhere(columns.left)
    if columns.have("messages"):
        pair: Pair = {"messages": _conversation(columns.take("messages"))}
    elif columns.have("prompt") and columns.have("completion"):
        pair = _prompt_and_completion(columns)
    elif columns.have("text"):
        pair = {"text": columns.take_text("text")}
    else:
        raise ValueError(f"a row has the columns {sorted(map(str, row))}; {NEEDED}")
    if "text" not in pair:
        pair = _with_surroundings(pair, columns)
    _refuse_others(columns, pair)
    renamed = [f"`{name}` is the {use}" for use, name in columns.taken.items() if name != use]
    return pair, ", ".join(renamed)


def with_known_names(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """The row with `prompt` and `completion` in place of the names that they have in the data."""
    new = dict(row)
    for known, name in columns.items():
        if name not in row:
            raise ValueError(f"a row has the columns {sorted(map(str, row))}, and no `{name}`")
        if known in row and known != name:
            raise ValueError(f"a row has `{known}` beside `{name}`: take one of them out")
        new[known] = new.pop(name)
    return new


class _Columns:
    """The columns of a row that say something; each is taken once."""

    def __init__(self, row: dict[str, Any]) -> None:
        """Note which columns of a row have something in them; those that are taken follow."""
        self.left = {name: value for name, value in row.items() if not is_nothing(value)}
        # An empty answer is an answer: rows with one are counted.
        self.left |= {name: "" for name in NAMES["completion"] if row.get(name) == ""}
        self.taken: dict[str, str] = {}  # the name, by what it is for

    def have(self, use: str) -> bool:
        return any(name in self.left for name in NAMES[use])

    def peek(self, use: str) -> Any:
        return self.left[self._name_of(use)]

    def take(self, use: str) -> Any:
        self.taken[use] = self._name_of(use)
        return self.left.pop(self.taken[use])

    def take_text(self, use: str) -> str:
        value = self.take(use)
        if not isinstance(value, str):
            raise ValueError(f"`{self.taken[use]}` is {shown(value)}: give a text")
        return value

    def _name_of(self, use: str) -> str:
        return next(name for name in NAMES[use] if name in self.left)


# --- the forms ------------------------------------------------------------------------------------


def _conversation(value: Any) -> list[Turn]:
    """The turns in the columns of a row; those of ms-swift's rounds, too: [{"human": …}]."""
    turns = from_text(value)
    if isinstance(turns, list) and all(_is_round_in_column(turn) for turn in turns):
        turns = [{"role": role, "content": text} for turn in turns for role, text in turn.items()]
    return turns_of(turns)


def _is_round_in_column(turn: Any) -> bool:
    return isinstance(turn, dict) and set(turn) in ({"human", "assistant"}, {"user", "assistant"})


def _prompt_and_completion(columns: _Columns) -> Pair:
    """A pair of texts, or a conversation in two lists of turns, as TRL has them."""
    asked = from_text(columns.peek("prompt"))
    answered = from_text(columns.peek("completion"))
    if _column_holds_turns(asked) and _column_holds_turns(answered):
        columns.take("prompt")
        columns.take("completion")
        # TRL learns the completion, and no answer before it.
        before = [_not_learnt(turn) for turn in turns_of(asked)]
        return {"messages": [*before, *turns_of(answered)]}
    prompt = columns.take_text("prompt")
    if columns.have("rest of the prompt"):
        rest = columns.take_text("rest of the prompt")
        prompt = f"{prompt}\n\n{rest}" if rest.strip() else prompt
    return {"prompt": prompt, "completion": columns.take_text("completion")}


def _column_holds_turns(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _not_learnt(turn: Turn) -> Turn:
    return turn | {"train": False} if turn["role"] == "assistant" else turn


def _with_surroundings(pair: Pair, columns: _Columns) -> Pair:
    """The pair with the columns of earlier rounds, system prompt and tools: a conversation."""
    if not any(columns.have(use) for use in ("history", "system", "tools")):
        return pair
    turns = pair.get("messages")
    if turns is None:
        turns = _round_of_row(pair["prompt"], pair["completion"])
    if columns.have("history"):
        turns = [*_history(columns.take("history")), *turns]
    if columns.have("system"):
        turns = _with_system(turns, columns.take_text("system"))
    if columns.have("tools"):
        return {"messages": turns, "tools": tools_of(columns.take("tools"))}
    return {"messages": turns}


def _round_of_row(question: str, answer: str) -> list[Turn]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _history(value: Any) -> list[Turn]:
    """A column of earlier rounds: [[question, answer], …] as Alpaca's, or turns, all learnt."""
    rounds = from_text(value)
    if _column_holds_turns(rounds):
        return _conversation(rounds)
    try:
        turns = [turn for question, answer in rounds for turn in _round_of_row(question, answer)]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"`history` is {shown(rounds)}: give pairs of a question and an answer"
        ) from error
    return turns_of(turns)


def _with_system(turns: list[Turn], system: str) -> list[Turn]:
    """The turns with the column of the system prompt in front, if they do not begin with it."""
    if not system.strip():
        return turns
    if turns[0]["role"] != "system":
        return [{"role": "system", "content": system}, *turns]
    if turns[0]["content"].strip() != system.strip():
        raise ValueError(
            f"there are two system prompts, {shown(system)} beside the turns and "
            f"{shown(turns[0]['content'])} as the first one: leave one of them"
        )
    return turns


# --- what is refused ------------------------------------------------------------------------------


def _refuse_columns_for_elsewhere(given: dict[str, Any]) -> None:
    for reason, names in ELSEWHERE.items():
        for name in names:
            if name in given:
                raise ValueError(f"a row has `{name}`, and {reason}: take the column out")


def _refuse_others(columns: _Columns, pair: Pair) -> None:
    """Raise ValueError for a column that would be dropped in silence."""
    said = [turn["content"] for turn in pair.get("messages", [])]
    said += [pair[name] for name in ("prompt", "completion", "text") if name in pair]
    texts = [text.strip() for text in said if text and text.strip()]
    for name, value in columns.left.items():
        if str(name).lower() not in UNIMPORTANT and not _repeats(value, texts):
            used = ", ".join(f"`{each}`" for each in columns.taken.values())
            raise ValueError(
                f"a row has `{name}` beside {used}, and it would not be used: take the column "
                f"out, or bring it into the text"
            )


def _repeats(value: Any, texts: list[str]) -> bool:
    """Whether a column only says what other columns have said already."""
    value = from_text(value)
    if isinstance(value, str):
        # One of the texts; or all of them in one, as Alpaca's `text`.
        parts = "\n\n".join(texts).split("\n\n")
        return value.strip() in ("", *texts) or all(part.strip() in value for part in parts)
    if _column_holds_turns(value):
        said = [turn.get("content", turn.get("value")) for turn in value]
        return all(str(text).strip() in texts for text in said)
    return False
