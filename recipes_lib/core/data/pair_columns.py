"""A row of a data set as a pair, a conversation or a text, whatever its columns are called.

    pair, columns = pair_of({"question": "1 + 2?", "answer": "3"})
    pair       {"prompt": "1 + 2?", "completion": "3"}
    columns    "`question` is the prompt, `answer` the completion"

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

Pair = dict[str, Any]  # `prompt` and `completion`, or `messages` and `tools`, or `text`

TURNS = ("messages", "conversations", "conversation")
PROMPTS = ("prompt", "instruction", "question", "query", "problem", "input")
COMPLETIONS = ("completion", "output", "answer", "response", "solution")
MORE = ("input", "context")  # joins the prompt, as Alpaca's and Dolly's
SYSTEMS = ("system", "system_prompt")
TOOLS = ("tools", "functions")

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

# --- a row ----------------------------------------------------------------------------------------


def pair_of(row: Any) -> tuple[Pair, str]:
    """The pair, conversation or text of a row, and which columns it was taken from, in words.

    The words are "" for `prompt` and `completion`, for `messages` and for `text`. Raises ValueError
    for a row without any of the columns above, for one that has others too, and for values of
    another type.
    """
    if not isinstance(row, dict):
        raise ValueError(
            f"a row is {shown(row)}: give an object with `prompt` and `completion`, or `messages`"
        )
    given = {name: value for name, value in row.items() if not is_nothing(value)}
    _refuse_what_is_elsewhere(given)
    prompt = _first_name(given, PROMPTS)
    # An empty answer is an answer: rows with one are counted.
    completion = _first_name({name for name in row if row[name] is not None}, COMPLETIONS)
    turns = _first_name(given, TURNS)
    if turns:
        used = [turns]
        pair: Pair = {"messages": _conversation(given[turns], turns)}
        words = "" if turns == "messages" else f"`{turns}` are the turns"
    elif prompt and completion:
        pair, used, words = _prompt_and_completion(row | given, prompt, completion)
    elif "text" in given:
        pair, used, words = {"text": _text(given, "text")}, ["text"], ""
    else:
        raise ValueError(f"a row has the columns {sorted(map(str, row))}; {NEEDED}")
    if "text" not in pair:
        pair, more = _with_surroundings(pair, given)
        used += more
        words = ", ".join([words, *(f"`{name}`" for name in more)]).removeprefix(", ")
    _refuse_others(given, used, pair)
    return pair, words


def with_known_names(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """The row with `prompt` and `completion` in place of the names that they have in the data."""
    new = dict(row)
    for known, name in columns.items():
        if name not in new:
            raise ValueError(f"a row has the columns {sorted(map(str, row))}, and no `{name}`")
        value = new.pop(name)
        if known in new:  # the name is known already, or stands beside it
            raise ValueError(f"a row has `{known}` beside `{name}`: take one of them out")
        new[known] = value
    return new


def _first_name(given: Any, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in given), None)


def _text(row: dict[str, Any], name: str) -> str:
    value = row[name]
    if not isinstance(value, str):
        raise ValueError(f"`{name}` is {shown(value)}: give a text")
    return value


def _conversation(value: Any, name: str) -> list[Turn]:
    """The turns; those of ms-swift's rounds, too: [{"human": …, "assistant": …}]."""
    turns = from_text(value)
    if isinstance(turns, list) and all(_is_a_round(turn) for turn in turns):
        turns = [{"role": role, "content": text} for turn in turns for role, text in turn.items()]
    return turns_of(turns, name)


def _is_a_round(turn: Any) -> bool:
    return isinstance(turn, dict) and set(turn) in ({"human", "assistant"}, {"user", "assistant"})


def _prompt_and_completion(
    row: dict[str, Any], prompt: str, completion: str
) -> tuple[Pair, list[str], str]:
    """A pair of texts, or a conversation in two lists of turns, as TRL has them."""
    asked = from_text(row[prompt])
    answered = from_text(row[completion])
    if _is_list_of_turns(asked) and _is_list_of_turns(answered):
        # TRL learns the completion, and no answer before it.
        before = [_not_learnt(turn) for turn in turns_of(asked, prompt)]
        turns = [*before, *turns_of(answered, completion)]
        return {"messages": turns}, [prompt, completion], ""
    text = _text(row, prompt)
    words = f"`{prompt}` is the prompt"
    used = [prompt, completion]
    more = _first_name(row, MORE)
    if more and more != prompt and not is_nothing(row[more]):
        used.append(more)
        if _text(row, more).strip():
            text = f"{text}\n\n{row[more]}"
        words = f"`{prompt}` and `{more}` are the prompt"
    if used == ["prompt", "completion"]:
        words = ""
    else:
        words += f", `{completion}` the completion"
    return {"prompt": text, "completion": _text(row, completion)}, used, words


def _is_list_of_turns(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _not_learnt(turn: Turn) -> Turn:
    return turn | {"train": False} if turn["role"] == "assistant" else turn


# --- what stands around the turns -----------------------------------------------------------------


def _with_surroundings(pair: Pair, given: dict[str, Any]) -> tuple[Pair, list[str]]:
    """The pair with the system prompt, earlier rounds and tools of the row; which columns it took.

    What has them becomes a conversation.
    """
    system, tools = _first_name(given, SYSTEMS), _first_name(given, TOOLS)
    history = _first_name(given, ("history",))
    used = [name for name in (system, history, tools) if name]
    if not used:
        return pair, []
    turns = pair.get("messages")
    if turns is None:
        turns = [
            {"role": "user", "content": pair["prompt"]},
            {"role": "assistant", "content": pair["completion"]},
        ]
    if history:
        turns = [*_history(given[history]), *turns]
    if system and _text(given, system).strip():
        turns = _with_system(turns, given[system])
    new: Pair = {"messages": turns}
    if tools:
        new["tools"] = tools_of(given[tools])
    return new, used


def _history(value: Any) -> list[Turn]:
    """Earlier rounds: [[question, answer], …] as Alpaca's, or turns. Their answers are learnt."""
    rounds = from_text(value)
    if _is_list_of_turns(rounds):
        return _conversation(rounds, "history")
    turns = []
    for each in rounds if isinstance(rounds, list) else [rounds]:
        texts = isinstance(each, list | tuple) and all(isinstance(text, str) for text in each)
        if not texts or len(each) != 2:
            raise ValueError(f"`history` has {shown(each)}: give pairs of a question and an answer")
        turns.append({"role": "user", "content": each[0]})
        turns.append({"role": "assistant", "content": each[1]})
    return turns


def _with_system(turns: list[Turn], system: str) -> list[Turn]:
    if turns[0]["role"] != "system":
        return [{"role": "system", "content": system}, *turns]
    if turns[0]["content"].strip() != system.strip():
        raise ValueError(
            f"there are two system prompts, {shown(system)} beside the turns and "
            f"{shown(turns[0]['content'])} as the first one: leave one of them"
        )
    return turns


# --- what is refused ------------------------------------------------------------------------------


def _refuse_what_is_elsewhere(given: dict[str, Any]) -> None:
    for reason, names in ELSEWHERE.items():
        found = [name for name in names if name in given]
        if found:
            raise ValueError(f"a row has `{found[0]}`, and {reason}: take the column out")


def _refuse_others(given: dict[str, Any], used: list[str], pair: Pair) -> None:
    """Raise ValueError for a column that would be dropped in silence."""
    texts = _texts_of(pair)
    for name, value in given.items():
        if name in used or str(name).lower() in UNIMPORTANT:
            continue
        if not _repeats(value, texts):
            raise ValueError(
                f"a row has `{name}` beside {_list_of(used)}, and it would not be used: take the "
                f"column out, or bring it into the text"
            )


def _list_of(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _texts_of(pair: Pair) -> list[str]:
    turns = pair.get("messages")
    texts = list(pair.values()) if turns is None else [turn["content"] for turn in turns]
    return [text.strip() for text in texts if isinstance(text, str) and text.strip()]


def _repeats(value: Any, texts: list[str]) -> bool:
    """Whether a column only says what is used already: each of its texts is one that is used, or it
    holds them all, as Alpaca's `text`.
    """
    value = from_text(value)
    if isinstance(value, str):
        parts = [part for text in texts for part in text.split("\n\n")]
        return value.strip() in ("", *texts) or all(part.strip() in value for part in parts)
    if _is_list_of_turns(value):
        said = [turn.get("content", turn.get("value")) for turn in value]
        return all(isinstance(text, str) and text.strip() in texts for text in said)
    return False
