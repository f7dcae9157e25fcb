"""What a chat template makes of a conversation, compared with what the conversation holds.

    turns, answers = written(tokenizer, messages, tools, places=[1, 3])
    question, text = answers[1]             # up to turn 3, as generation sees it, and with it

A template is a program of a stranger. Some leave parts out: the thinking of an answer, the calls of
tools, the system prompt. So nothing is believed: of each turn every piece has to stand in the text,
in order, and what is learnt holds the pieces of its own turn.

A tokenizer without a template gets the plainest form, for one question and one answer.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from typing import Any

from recipes_lib.core.data.turns import Turn, shown

THINKING = re.compile(r"</?think(?:ing)?>|\[/?THINK\]")  # what stands around it, in a content
NO_CHANCE = 12  # characters: a text as long is in no mark of a template by chance
LAST_MARK = re.compile(r"(<think(?:ing)?>|\[THINK\])\s*$")  # opens it, at the end of a question

NO_TEMPLATE = (
    "the tokenizer has no chat template, which says where a turn begins and ends: give pairs of "
    "one question and one answer, or set one (finetune: --chat-template chatml)"
)

# ChatML, with tools as Hermes and Qwen write them.
CHATML = """{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools

You may call one or more of these functions:
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>

For each call, write a JSON object within <tool_call></tool_call>:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if not (tools and loop.first and message.role == 'system') %}<|im_start|>{{ message.role }}
{% if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}{% if message.content or not loop.first %}
{% endif %}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


# --- the text -------------------------------------------------------------------------------------


Answer = tuple[str, str]  # the text up to what is learnt of a turn, and the text with it


def written(
    tokenizer: Any, messages: Sequence[Turn], tools: Any = None, *, places: Sequence[int]
) -> tuple[list[Turn], list[Answer]]:
    """The turns as the template of `tokenizer` reads them, and the answer at each of `places`.

    Some templates write the arguments of a call from an object, others from its JSON text; some
    know thinking as a field, others as a part of the content. The first form counts of which
    nothing is left out. Where there is none, a ValueError names what is.
    """
    if not getattr(tokenizer, "chat_template", None):
        _check_plain(messages, tools)
    forms = FORMS if any(map(_template_may_have_forms, messages)) else FORMS[:1]
    reasons = []
    for form in forms:
        turns = [form(turn) for turn in messages]
        try:
            return turns, _answers_in_text(tokenizer, messages, turns, tools, places)
        except ValueError as error:
            reasons.append(error)
    # What is left out says more than what Python said of a form that is not this template's.
    raise next((each for each in reasons if "leaves out" in str(each)), reasons[0])


def _answers_in_text(
    tokenizer: Any, given: Sequence[Turn], turns: list[Turn], tools: Any, places: Sequence[int]
) -> list[Answer]:
    """The answers in a template's text of one form, with each piece that is `given`."""
    found = []
    for place, turn in enumerate(given):
        is_learnt = place in places
        if not is_learnt and not _template_may_have_forms(turn):
            continue
        question, text = _borders_of_answer(tokenizer, turns, tools, place)
        if is_learnt:
            _check_before(given[:place], question)
            found.append((question, text))
        _check_turn_is_written(turn, text[len(question) :], place, thinking=is_learnt)
    if tools:
        _check_tools(tokenizer, turns, tools)
    return found


def _check_tools(tokenizer: Any, turns: list[Turn], tools: list[dict[str, Any]]) -> None:
    """Each tool is named once more where the template is given the tools."""
    first_answer = [turn["role"] for turn in turns].index("assistant")
    without = render(tokenizer, turns[:first_answer], None, asks=True)
    text = render(tokenizer, turns[:first_answer], tools, asks=True)
    for tool in tools:
        name = tool["function"]["name"]
        if text.count(name) <= without.count(name):
            raise ValueError(
                f"the chat template leaves out the tool {name!r}: take one that knows tools "
                f"(finetune: --chat-template chatml), or describe them in a turn of `system`"
            )


def render(
    tokenizer: Any, messages: Sequence[Turn], tools: Any = None, *, asks: bool = False
) -> str:
    """The text that the template makes of `messages`; `asks` adds what comes before an answer."""
    import jinja2  # with which transformers runs templates

    if not getattr(tokenizer, "chat_template", None):
        return _without_template(tokenizer, messages)
    turns = [_without_field(turn, "train") for turn in messages]
    try:
        return tokenizer.apply_chat_template(
            turns, tools=tools, tokenize=False, add_generation_prompt=asks
        )
    # A template that is given what it does not know fails as Python does.
    except (jinja2.TemplateError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise ValueError(f"the chat template refuses this conversation: {error}") from error


def _without_field(turn: Turn, field: str) -> Turn:
    return {name: value for name, value in turn.items() if name != field}


def _check_plain(messages: Sequence[Turn], tools: Any) -> None:
    """Raise ValueError for what cannot be told apart without a template."""
    roles = [turn["role"] for turn in messages]
    calls = any(turn.get("tool_calls") or turn.get("reasoning_content") for turn in messages)
    if roles not in (["user", "assistant"], ["system", "user", "assistant"]) or tools or calls:
        raise ValueError(NO_TEMPLATE)


def _without_template(tokenizer: Any, messages: Sequence[Turn]) -> str:
    """A blank line behind a question, the tokenizer's end mark behind an answer."""
    end = tokenizer.eos_token or ""
    texts = []
    for turn in messages:
        texts.append(turn["content"] + (end if turn["role"] == "assistant" else "\n\n"))
    return "".join(texts)


# --- the border between what is asked and what is learnt ------------------------------------------


def _borders_of_answer(tokenizer: Any, turns: Sequence[Turn], tools: Any, place: int) -> Answer:
    """The template's text up to where an answer begins, and up to where it ends."""
    turn = turns[place]
    # The template's line break after the end mark is not learnt: generation stops at the mark.
    text = render(tokenizer, turns[: place + 1], tools).rstrip("\n")
    if turn["role"] == "assistant":
        asked = render(tokenizer, turns[:place], tools, asks=True)
        if text.startswith(asked):
            return asked, text
        carried = _with_its_thinking(turn, asked, text)
        if carried is not None:
            return asked, carried
    else:
        asked = text  # nothing asks for it: its content is what is learnt
    before = render(tokenizer, turns[:place], tools).rstrip("\n") if place else ""
    if not text.startswith(before):
        raise ValueError(
            "the chat template rewrites the question once it is answered: "
            "the answer cannot be masked"
        )
    # The template asks for an answer otherwise than it writes one: as far as they agree.
    agree = _shared_beginning(asked, text)
    pieces = pieces_of(turn)
    begins = text.find(pieces[0], len(before)) if pieces else -1
    if begins < 0:
        begins = agree
    return text[: min(agree, begins)], text


def _shared_beginning(one: str, other: str) -> int:
    """How many characters two texts of a template have in common from their beginning."""
    count = min(len(one), len(other))
    while one[:count] != other[:count]:
        count -= 1
    return count


def _with_its_thinking(turn: Turn, asked: str, text: str) -> str | None:
    """The text of an answer whose thinking the template cuts, although it asks for it.

    The first template of R1's distillates opens `<think>` for generation, and drops all up to
    `</think>` from an answer: what is generated in use is the whole content behind `<think>`.
    """
    content = (turn["content"] or "").strip()
    asked_for = LAST_MARK.search(asked)
    if asked_for is None or not THINKING.search(content):
        return None
    # Either the content holds the mark, or it is what was generated behind it.
    rest = content.removeprefix(asked_for[1])
    if THINKING.search(rest) is None or THINKING.search(rest)[0] == asked_for[1]:
        return None
    answer = pieces_of(turn)[-1]
    begins = text.rfind(answer)
    if begins < 0:
        return None
    return asked + rest.lstrip() + text[begins + len(answer) :]


# --- the forms of a turn --------------------------------------------------------------------------


def _template_may_have_forms(turn: Turn) -> bool:
    return bool(turn.get("tool_calls") or turn.get("reasoning_content"))


def _as_objects(turn: Turn) -> Turn:
    # gpt-oss calls it so.
    if turn.get("reasoning_content"):
        return turn | {"thinking": turn["reasoning_content"]}
    return turn


def _as_texts(turn: Turn) -> Turn:
    """For a template: the arguments of calls as JSON text, as OpenAI sends them."""
    turn = copy.deepcopy(_as_objects(turn))
    for call in turn.get("tool_calls", []):
        call["function"]["arguments"] = _json(call["function"]["arguments"])
    return turn


def _in_the_content(turn: Turn) -> Turn:
    """For a template: the thinking as a part of the content."""
    if not turn.get("reasoning_content"):
        return turn
    content = f"<think>\n{turn['reasoning_content']}\n</think>\n\n{turn['content'] or ''}"
    return _without_field(turn, "reasoning_content") | {"content": content}


def _with_empty_content(turn: Turn) -> Turn:
    if turn["content"] is None:
        return turn | {"content": ""}
    return turn


FORMS = (_as_objects, _as_texts, _with_empty_content, _in_the_content)


def _json(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


# --- what stands in the text ----------------------------------------------------------------------


def pieces_of(turn: Turn, *, thinking: bool = True) -> list[str]:
    """The pieces of a turn's content that a template has to write, in this order.

    Thinking is a piece of its own: templates put it between marks of theirs.
    """
    content = THINKING.split(turn["content"] or "")
    pieces = [turn.get("reasoning_content", ""), *content]
    if not thinking:
        pieces = content[-1:]
    return [piece.strip() for piece in pieces if piece.strip()]


def keeps_all(tokenizer: Any, messages: Sequence[Turn], tools: Any = None) -> bool:
    """Whether the template by itself writes each piece of a conversation.

    If not, other libraries learn less of it than `tokenize_chat`, which makes rows of its answers.
    """
    text = render(tokenizer, messages, tools)
    return all(piece in text for turn in messages for piece in pieces_of(turn))


def written_behind(turn: Turn, text: str) -> str:
    """What the template writes behind an answer that ends `text`: its end mark, or nothing."""
    pieces = pieces_of(turn)
    if not pieces or turn.get("tool_calls"):
        return text[-1:]
    return text.rpartition(pieces[-1])[2].strip()


def _check_before(turns: Sequence[Turn], question: str) -> None:
    """Raise ValueError for a piece of the turns before an answer that the template loses."""
    begins = 0
    for number, turn in enumerate(turns):
        # Templates drop the thinking of earlier answers, which are learnt in rows of their own.
        pieces = pieces_of(turn, thinking=turn["role"] != "assistant")
        begins = _check_pieces_in_order(question, pieces, number, begins)


def _check_pieces_in_order(text: str, pieces: Sequence[str], number: int, begins: int = 0) -> int:
    """Raise ValueError unless the template writes the pieces of a turn in their order."""
    for piece in pieces:
        found = text.find(piece, begins)
        if found < 0:
            raise ValueError(
                f"the chat template leaves out a part of turn {number} (from 0), {shown(piece)}: "
                f"take another template, or take that part out"
            )
        begins = found + len(piece)
    return begins


def _check_turn_is_written(turn: Turn, text: str, number: int, *, thinking: bool) -> None:
    """Raise ValueError for a piece or a call of a turn that the template loses or repeats."""
    pieces = pieces_of(turn, thinking=thinking)
    _check_pieces_in_order(text, pieces, number)
    given = "\n".join(pieces) + _json(turn.get("tool_calls", []))
    for piece in pieces:
        if len(piece) >= NO_CHANCE and text.count(piece) > given.count(piece):
            raise ValueError(
                f"the chat template writes a part of turn {number} (from 0) more than once, "
                f"{shown(piece)}: take another template"
            )
    for call in turn.get("tool_calls", []):
        function = call["function"]
        # What Python prints for an object is not what a tool reads.
        printed = isinstance(function["arguments"], dict) and str(function["arguments"]) in text
        lost = [leaf for leaf in _leaves_of_call(function) if not _is_written_in(leaf, text)]
        if lost or (printed and function["arguments"]):
            raise ValueError(
                f"the chat template leaves out a part of `tool_calls` of turn {number} (from 0), "
                f"{shown((lost or [function['arguments']])[0])}: take a template that knows tools "
                f"(finetune: --chat-template chatml), or write the call as the text that the model "
                f"is to write, into `content`"
            )


def _leaves_of_call(value: Any) -> list[Any]:
    """The names and values of a call, without what a template holds them together with."""
    if isinstance(value, dict):
        names = [name for name in value if name not in ("name", "arguments")]
        return [*names, *(leaf for each in value.values() for leaf in _leaves_of_call(each))]
    if isinstance(value, list):
        return [leaf for each in value for leaf in _leaves_of_call(each)]
    return [value]


def _is_written_in(leaf: Any, text: str) -> bool:
    forms = [str(leaf), json.dumps(leaf), json.dumps(leaf, ensure_ascii=False)]
    return any(form in text or form[1:-1] in text for form in forms if form.strip('"'))
