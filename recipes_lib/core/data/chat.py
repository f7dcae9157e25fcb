"""Pairs and conversations as tokens and labels, formatted by the model's own chat template.

    tokens   <user> Add 1 and 2 </user> <assistant>  3   </assistant>
    labels     -     -  -  -  -    -         -       3   </assistant>

A label stands at its own token, and IGNORED (-100) where there is nothing to learn. The labels are
*not* shifted: Hugging Face models shift them inside, and doing it twice is a silent bug.
"""

from __future__ import annotations

import itertools
from typing import Any

IGNORED = -100  # the label that the loss leaves out

Row = dict[str, list[int]]  # `input_ids` and `labels`, of one length


def tokenize_pair(tokenizer: Any, prompt: str, completion: str) -> Row:
    """One chat-formatted pair; `labels` is IGNORED on everything but the answer and its end mark.

    Raises ValueError for an empty completion.
    """
    if getattr(tokenizer, "chat_template", None):
        chat = [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": completion},
        ]
        return tokenize_chat(tokenizer, chat)[0]
    if not completion.strip():
        raise ValueError("the completion is empty: there would be nothing to learn from this pair")
    question = _ids(tokenizer, f"{prompt}\n\n")
    answer = _ids(tokenizer, completion + (tokenizer.eos_token or ""))
    return {"input_ids": question + answer, "labels": [IGNORED] * len(question) + answer}


def tokenize_chat(tokenizer: Any, messages: list[dict[str, str]]) -> list[Row]:
    """A conversation as rows, with the loss on every answer and its end mark.

    It is one row if the template leaves earlier turns as they were. Some rewrite them: Qwen3 drops
    the thinking of earlier answers. Then each answer is a row of its own, after the history that
    the model will see in use. Raises ValueError for a conversation without an answer, one that
    begins with it, an empty answer, and a template that changes the question once it is answered.
    """
    answers = _places_of_answers(messages)
    rows: list[Row] = []
    done = ""  # the text that the last row holds
    for place in answers:
        question, text = _question_and_answer(tokenizer, messages, place)
        if not rows or not question.startswith(done):
            rows.append({"input_ids": [], "labels": []})
            done = ""
        before = rows[-1]["input_ids"]
        not_learnt, learnt = _new_tokens(tokenizer, before, done, question, text)
        rows[-1]["input_ids"] += not_learnt + learnt
        rows[-1]["labels"] += [IGNORED] * len(not_learnt) + learnt
        done = text
    return rows


def _places_of_answers(messages: list[dict[str, str]]) -> list[int]:
    """Where the assistant speaks; ValueError if there is nothing to learn from it."""
    roles = [message["role"] for message in messages]
    answers = [place for place, role in enumerate(roles) if role == "assistant"]
    empty = [place for place in answers if not str(messages[place]["content"]).strip()]
    if not answers or empty:
        raise ValueError(f"nothing to learn: an empty answer, or no 'assistant' in {roles}")
    if answers[0] == 0:
        raise ValueError(
            "the conversation begins with an answer: "
            "give the message before it, of `user` or `system`"
        )
    return answers


def _question_and_answer(
    tokenizer: Any, messages: list[dict[str, str]], place: int
) -> tuple[str, str]:
    """The text up to the answer at `place`, as generation would see it, and with the answer."""
    import jinja2  # with which transformers runs templates

    try:
        question = tokenizer.apply_chat_template(
            messages[:place], tokenize=False, add_generation_prompt=True
        )
        text = tokenizer.apply_chat_template(messages[: place + 1], tokenize=False)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template refuses this conversation: {error}") from error
    if not text.startswith(question):
        raise ValueError(
            "the chat template rewrites the question once it is answered: "
            "the answer cannot be masked"
        )
    # The template's line break after the end mark is not learnt: generation stops at the mark.
    return question, text.rstrip("\n")


def _new_tokens(
    tokenizer: Any, before: list[int], done: str, question: str, text: str
) -> tuple[list[int], list[int]]:
    """The tokens that `text` adds to a row of the tokens `before`: those up to the answer, and the
    answer's.
    """
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
