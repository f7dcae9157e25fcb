"""The turns of a conversation in one form, whatever a data set calls their fields.

    {"from": "gpt", "value": "3", "weight": 0}
    {"role": "assistant", "content": "3", "train": False}

    role, from                          who speaks; ShareGPT's, ms-swift's and LLaMA-Factory's names
    content, value                      a text, parts of text, or nothing beside calls of tools
    tool_calls, function_call           what the assistant calls, also as a turn of its own
    reasoning_content, reasoning        thinking that stands beside the content
    train, training, weight, loss       whether the turn is learnt: Axolotl, ShareGPT and OpenAI,
                                        ms-swift

An answer is learnt unless one of the last says no; another turn only if `train` says yes. Every
other field is known to be unimportant, or refused by its name.
"""

from __future__ import annotations

import ast
import json
from typing import Any

Turn = dict[str, Any]  # `role` and `content`, and `train`, `tool_calls` … where they are given

ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "ipython": "tool",
}
CALLS = ("function_call", "tool_call")  # roles whose content is a call
ROLE_FIELDS = ("role", "from")
CONTENT_FIELDS = ("content", "value")
CALL_FIELDS = ("tool_calls", "function_call")
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
SHARE_FIELDS = ("train", "training", "weight", "loss", "loss_scale")
PASSED_ON = ("name", "tool_call_id")  # to templates, some of which write them
USED = (*ROLE_FIELDS, *CONTENT_FIELDS, *CALL_FIELDS, *REASONING_FIELDS, *SHARE_FIELDS, *PASSED_ON)

# Facts about a row or a turn, of which none is to be read by a model.
UNIMPORTANT = {"id", "idx", "index", "uuid", "hash", "prompt_id", "question_id", "conversation_id"}
UNIMPORTANT |= {"message_id", "user_id", "source", "dataset", "dataset_name", "data_source", "url"}
UNIMPORTANT |= {"license", "author", "language", "lang", "category", "subset", "tags", "metadata"}
UNIMPORTANT |= {"meta", "model", "generator", "created_at", "timestamp", "token_count"}
UNIMPORTANT |= {"num_tokens", "num_turns", "parallel_tool_calls", "__index_level_0__"}


def turns_of(value: Any) -> list[Turn]:
    """The turns in a column: a list of them, or its JSON text.

    Raises ValueError with the number of the turn for what has no place in the form above.
    """
    turns = from_text(value)
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"the turns are {shown(value)}: give a list of one turn or more")
    found: list[Turn] = []
    for number, turn in enumerate(turns):
        try:
            turn = _turn_in_one_form(turn)
        except ValueError as error:
            raise ValueError(f"turn {number} (from 0) {error}") from error
        # Several calls at once, each in a turn: for a template they are one turn.
        if turn.pop("continues", False) and found and found[-1].get("tool_calls"):
            found[-1]["tool_calls"] += turn["tool_calls"]
        else:
            found.append(turn)
    return found


def is_learnt(turn: Turn) -> bool:
    """Whether a turn carries loss: an answer does, unless it says no."""
    return turn.get("train", turn["role"] == "assistant")


def from_text(value: Any) -> Any:
    """What a column of turns means that holds a list or an object as a text."""
    if not isinstance(value, str) or value.strip()[:1] not in ("[", "{"):
        return value
    for read in (json.loads, ast.literal_eval):  # JSON, or what Python prints
        try:
            return read(value)
        except (ValueError, SyntaxError):
            continue
    return value


def shown(value: Any) -> str:
    """The beginning of a turn's value, as JSON writes it."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 40 else f"{text[:40]}…"


def is_nothing(value: Any) -> bool:
    """Whether a field of a turn, or a cell of a table, is empty."""
    return value is None or (isinstance(value, str | list | dict) and not value)


# --- a turn ---------------------------------------------------------------------------------------


def _turn_in_one_form(turn: Any) -> Turn:
    """A turn by the names of OpenAI. Raises ValueError for a field that would be lost."""
    if not isinstance(turn, dict):
        raise ValueError(f"is {shown(turn)}: give an object with `role` and `content`")
    given = {name: value for name, value in turn.items() if not is_nothing(value)}
    for name in given:
        if name not in USED and name not in UNIMPORTANT:
            raise ValueError(
                f"has `{name}`, of which nothing is known here: take it out, or bring what it says "
                f"into the content, or into `train`, `tool_calls` or `reasoning_content`"
            )
    speaker = _first_field(given, ROLE_FIELDS)
    if not isinstance(speaker, str):
        raise ValueError(f"has {sorted(map(str, turn))}: give the texts `role` and `content`")
    role = ROLES.get(speaker.lower(), speaker.lower())
    found: Turn = {"role": role, "content": None}
    calls = _calls_of_turn(given)
    if role in CALLS:
        found["role"] = "assistant"
        found["continues"] = True
        calls = _calls_of_turn({"tool_calls": from_text(_first_field(given, CONTENT_FIELDS))})
    elif any(name in turn and turn[name] is not None for name in CONTENT_FIELDS):
        found["content"] = _content_of_turn(_first_field(turn, CONTENT_FIELDS), role)
    elif not calls:
        raise ValueError(f"has {sorted(map(str, turn))}: give the texts `role` and `content`")
    if calls:
        found["tool_calls"] = calls
    reasoning = _first_field(given, REASONING_FIELDS)
    if reasoning is not None:
        found["reasoning_content"] = _text_or_refuse(reasoning, "reasoning_content")
    found |= {name: given[name] for name in PASSED_ON if name in given}
    return found | _share_of_loss(given, found["role"])


def _first_field(given: dict[str, Any], names: tuple[str, ...]) -> Any:
    """The value of the first of a turn's fields `names` that is there."""
    return next((given[name] for name in names if given.get(name) is not None), None)


def _text_or_refuse(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"has the `{name}` {shown(value)}: give a text")
    return value


def _content_of_turn(value: Any, role: str) -> str:
    """The content of a turn as one text: of parts, of what a tool has returned, or as it is."""
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        return "".join(_text_of_part(part) for part in value)
    if role == "tool" and not isinstance(value, str):  # what a tool has returned, as an object
        return json.dumps(value, ensure_ascii=False)
    return _text_or_refuse(value, "content")


def _text_of_part(part: dict[str, Any]) -> str:
    """The text of a part of a turn: {"type": "text", "text": …}."""
    given = {name: value for name, value in part.items() if not is_nothing(value)}
    others = sorted(set(given) - {"type", "text", "cache_control"})
    if given.get("type", "text") not in ("text", "input_text", "output_text") or others:
        raise ValueError(
            f"has the part {shown(part)}, and only texts are trained here, as wholes: leave the "
            f"row out, or give its text alone"
        )
    return _text_or_refuse(part.get("text", ""), "text")


def _share_of_loss(given: dict[str, Any], role: str) -> dict[str, bool]:
    """`train`, where the turn says otherwise than its role."""
    for name in SHARE_FIELDS:
        if given.get(name, 1) not in (0, 1):
            raise ValueError(
                f"has the `{name}` {shown(given[name])}: a turn is learnt (1) or not (0)"
            )
    values = [given[name] for name in SHARE_FIELDS if name in given]
    if not all(values):
        return {"train": False} if role == "assistant" else {}
    # Axolotl learns such a turn, whoever speaks; a weight is of what is learnt anyhow.
    asked_for = given.get("train") or given.get("training")
    return {"train": True} if asked_for and role != "assistant" else {}


# --- tools ----------------------------------------------------------------------------------------


def _calls_of_turn(given: dict[str, Any]) -> list[dict[str, Any]]:
    """The calls of a turn as OpenAI writes them, the arguments as an object."""
    calls = from_text(_first_field(given, CALL_FIELDS))
    if calls is None:
        return []
    found = []
    for call in calls if isinstance(calls, list) else [calls]:
        call = from_text(call)
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or "name" not in function:
            raise ValueError(
                f"has the call {shown(call)}: give an object with `name` and `arguments`"
            )
        arguments = function.get("arguments", function.get("parameters"))
        function = {"name": function["name"], "arguments": from_text(arguments or {})}
        new = {"type": "function", "function": function}
        if call.get("id"):
            new["id"] = call["id"]
        found.append(new)
    return found


def tools_of(value: Any) -> list[dict[str, Any]]:
    """The tools beside the turns of a row as OpenAI writes them; a list or its JSON text."""
    tools = from_text(value)
    found = []
    for tool in tools if isinstance(tools, list) else [tools]:
        tool = from_text(tool)
        if not isinstance(tool, dict) or "name" not in tool.get("function", tool):
            raise ValueError(
                f"a tool is {shown(tool)}: give an object with `name`, `description`, `parameters`"
            )
        if "function" not in tool:
            tool = {"type": "function", "function": tool}
        found.append(tool)
    return found
