"""A row of a data set as a pair or as a conversation, whatever its columns are called.

    pair, columns = pair_of({"question": "1 + 2?", "answer": "3"})
    pair       {"prompt": "1 + 2?", "completion": "3"}
    columns    "`question` is the prompt, `answer` the completion"

The names of the columns that public data sets have in common:

    messages                       a list of turns with `role` and `content`
    prompt, completion             two texts
    conversations                  a list of turns with `from` and `value`, as ShareGPT's
    instruction, input, output     as Alpaca's; the prompt is the first two
    question, answer               as GSM8K's

What would be lost in silence is refused: tools and their calls, parts that are no text, and turns
of weight 0.
"""

from __future__ import annotations

import json
from typing import Any

Pair = dict[str, Any]  # `prompt` and `completion`, or `messages`

# ShareGPT's names of the roles.
ROLES = {"human": "user", "gpt": "assistant", "system": "system"}

NEEDED = (
    "the texts `prompt` and `completion` are needed (rename them), or `messages`, a list of turns "
    "with the texts `role` and `content`"
)
CALLS_AS_TEXT = "write the call as the text that the model is to write, into `content`"

# --- a row ----------------------------------------------------------------------------------------


def pair_of(row: Any) -> tuple[Pair, str]:
    """The pair or conversation of a row, and which columns it was taken from, in words.

    The words are "" for `prompt` and `completion`, and for `messages`. Raises ValueError for a row
    without any of the columns above, for values of another type, and for tools.
    """
    if not isinstance(row, dict):
        raise ValueError(
            f"a row is {_shown(row)}: give an object with `prompt` and `completion`, or `messages`"
        )
    # A table has every column in every row, and null where a row has nothing.
    given = {name: value for name, value in row.items() if value is not None}
    _refuse_tools(given)
    if "messages" in given:
        return {"messages": _conversation(given["messages"])}, ""
    if "prompt" in row and "completion" in row:
        return _prompt_and_completion(row["prompt"], row["completion"]), ""
    if "conversations" in given:
        return {"messages": _share_gpt(given["conversations"])}, "`conversations` are the turns"
    if "instruction" in row and "output" in row:
        prompt = _text(row, "instruction")
        more = _text({"input": ""} | given, "input")
        if more.strip():
            prompt = f"{prompt}\n\n{more}"
        words = "`instruction` and `input` are the prompt, `output` the completion"
        return {"prompt": prompt, "completion": _text(row, "output")}, words
    if "question" in row and "answer" in row:
        pair = {"prompt": _text(row, "question"), "completion": _text(row, "answer")}
        return pair, "`question` is the prompt, `answer` the completion"
    raise ValueError(f"a row has the columns {sorted(map(str, row))}; {NEEDED}")


def _prompt_and_completion(prompt: Any, completion: Any) -> Pair:
    """A pair of texts, or a conversation in two lists of turns, as TRL has them."""
    if _is_list_of_turns(prompt) and _is_list_of_turns(completion):
        return {"messages": _conversation([*prompt, *completion])}
    row = {"prompt": prompt, "completion": completion}
    return {"prompt": _text(row, "prompt"), "completion": _text(row, "completion")}


def _is_list_of_turns(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _text(row: dict[str, Any], name: str) -> str:
    value = row[name]
    if not isinstance(value, str):
        raise ValueError(f"`{name}` is {_shown(value)}: give a text")
    return value


def _shown(value: Any) -> str:
    """The beginning of a value, as JSON writes it."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 40 else f"{text[:40]}…"


# --- a conversation -------------------------------------------------------------------------------


def _conversation(turns: Any) -> list[dict[str, Any]]:
    """The turns, if each has a role and a text."""
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"`messages` is {_shown(turns)}: give a list of one turn or more")
    return [_turn(number, turn) for number, turn in enumerate(turns)]


def _turn(number: int, turn: Any) -> dict[str, Any]:
    where = f"turn {number} (from 0)"
    if not isinstance(turn, dict):
        raise ValueError(f"{where} is {_shown(turn)}: give an object with `role` and `content`")
    given = {name: value for name, value in turn.items() if value is not None}
    for name in ("tool_calls", "function_call"):
        # Most templates leave a call out, and the model would learn an empty answer.
        if given.get(name):
            raise ValueError(f"{where} has `{name}`, which this does not train on: {CALLS_AS_TEXT}")
    if given.get("weight") == 0:
        raise ValueError(
            f"{where} has the weight 0, and every answer is learnt here: "
            f"give the conversation without what comes after the turn before it"
        )
    for name in ("role", "content"):
        if name not in turn:
            raise ValueError(
                f"{where} has {sorted(map(str, turn))}: give the texts `role` and `content`"
            )
        try:
            _text(turn, name)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    return given


def _share_gpt(turns: Any) -> list[dict[str, Any]]:
    """Turns with `from` and `value`, or with `role` and `content` under the other name."""
    if not _is_list_of_turns(turns):
        raise ValueError(f"`conversations` is {_shown(turns)}: give a list of one turn or more")
    renamed = []
    for number, turn in enumerate(turns):
        if not isinstance(turn, dict) or "from" not in turn:
            renamed.append(turn)
            continue
        if turn["from"] not in ROLES:
            raise ValueError(
                f"turn {number} (from 0) is from {_shown(turn['from'])}: "
                f"give one of {', '.join(ROLES)}, or `messages` with roles of the chat template"
            )
        renamed.append({"role": ROLES[turn["from"]], "content": turn.get("value")})
    return _conversation(renamed)


def _refuse_tools(given: dict[str, Any]) -> None:
    """Raise ValueError for tools beside the turns: without them the prompt is not that of use."""
    for name in ("tools", "functions"):
        if given.get(name):
            raise ValueError(
                f"a row has `{name}`, which are not put into the prompt: describe them in the text "
                f"of a turn with the role `system`, take the column out, and where a turn calls "
                f"one, {CALLS_AS_TEXT}"
            )
