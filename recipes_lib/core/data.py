"""Real text without a download: Python's own standard library.

`load_instructions` gives instruction pairs (a function's source → its docstring), chat-formatted with
the model's template, with the loss on the answer only. `load_text` gives long running text. Both are
split by *module*, so no module is in training and in validation. A data set of the hub, a local JSON
Lines file or a list of pairs takes the same way.
"""

from __future__ import annotations

import itertools
import json
import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from recipes_lib.core.corpus import docstring_pairs, modules

IGNORED = -100  # the label that the loss leaves out
SPLITS = ("train", "validation")


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
        max_tokens: pairs that are longer are left out, never cut: a cut answer teaches to stop anywhere.
        limit: how many rows at most; the order is shuffled once, the same on every machine with this Python.
        dataset: None for the standard library, or rows with `prompt` and `completion`, or with `messages` (turns
            with `role` and `content`): an iterable, a local `.jsonl` file, or a hub id (needs the hub).
    Raises ValueError for an unknown split, sizes below 1, no pair left, and another split than "train" of a file or
    an iterable: they have none, and the same rows would be trained on and held out.
    """
    from datasets import Dataset

    if max_tokens < 1 or (limit is not None and limit < 1):
        raise ValueError(f"max_tokens={max_tokens}, limit={limit}: give numbers of 1 or more")
    rows = []
    for pair in load_pairs(split=split, dataset=dataset):
        chat = pair.get("messages")
        try:
            found = tokenize_chat(tokenizer, chat) if chat else [tokenize_pair(tokenizer, **pair)]
        except ValueError as error:
            raise ValueError(f"{error} (in {str(pair)[:100]})") from error
        rows += [row for row in found if len(row["input_ids"]) <= max_tokens]
        if limit is not None and len(rows) >= limit:
            break
    if not rows:
        raise ValueError(
            f"no pair is left in split {split!r}: each is empty or longer than max_tokens={max_tokens}; "
            f"raise max_tokens, or check that the data set has text in `prompt` and `completion`"
        )
    return Dataset.from_list(rows[:limit])


def load_pairs(
    *, split: str = "train", dataset: str | Iterable[dict] | None = None
) -> Iterator[dict[str, str]]:
    """The pairs of `load_instructions`, with its errors, as text; a warning counts those with an empty completion."""
    _check(split)
    if dataset is None:
        yield from docstring_pairs(split)
        return
    if split != "train" and (not isinstance(dataset, str) or os.path.exists(dataset)):
        raise ValueError(
            f"split={split!r}: these pairs have no splits: give the held-out ones as a data set of theirs"
        )
    empty = 0
    for row in map(_pair, dataset) if not isinstance(dataset, str) else _read(dataset, split):
        if "messages" in row or row["completion"].strip():
            yield row
        else:
            empty += 1
    if empty:
        warnings.warn(f"left out, for their completion is empty: {empty} pairs", stacklevel=2)


def tokenize_pair(tokenizer: Any, prompt: str, completion: str) -> dict[str, list[int]]:
    """One chat-formatted pair; `labels` is IGNORED on everything but the answer and its end mark."""
    if getattr(tokenizer, "chat_template", None):
        chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        return tokenize_chat(tokenizer, chat)[0]
    if not completion.strip():
        raise ValueError("the completion is empty: there would be nothing to learn from this pair")
    head = tokenizer(f"{prompt}\n\n", add_special_tokens=False)["input_ids"]
    tail = tokenizer(f"{completion}{tokenizer.eos_token or ''}", add_special_tokens=False)[
        "input_ids"
    ]
    return {"input_ids": head + tail, "labels": [IGNORED] * len(head) + tail}


def tokenize_chat(tokenizer: Any, messages: list[dict[str, str]]) -> list[dict[str, list[int]]]:
    """A conversation as rows with `input_ids` and `labels`, the loss on every answer and its end mark.

    One row, if the template leaves earlier turns as they were. Some rewrite them (Qwen3 drops the thinking of earlier
    answers): then each answer is a row of its own, after the history that the model will see in use.
    The labels are *not* shifted: Hugging Face models shift them inside, and doing it twice is a silent bug.
    Raises ValueError for a conversation without an answer, one that begins with it, an empty answer, and a template
    that changes the question once it is answered.
    """
    import jinja2  # which transformers runs templates with

    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers or not all(str(messages[i]["content"]).strip() for i in answers):
        raise ValueError(
            f"nothing to learn: an empty answer, or no 'assistant' in {[m['role'] for m in messages]}"
        )
    if answers[0] == 0:
        raise ValueError(
            "the conversation begins with an answer: give the message before it, of `user` or `system`"
        )

    def ids_of(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    rows, done = [], ""  # the rows, and the text that the last one holds
    for i in answers:
        try:
            question = tokenizer.apply_chat_template(
                messages[:i], tokenize=False, add_generation_prompt=True
            )
            # The template's line break after the end mark is not learnt: generation stops at the mark.
            text = tokenizer.apply_chat_template(messages[: i + 1], tokenize=False).rstrip("\n")
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses this conversation: {error}") from error
        if not text.startswith(question):
            raise ValueError(
                "the chat template rewrites the question once it is answered: the answer cannot be masked"
            )
        if not rows or not question.startswith(done):
            rows.append({"input_ids": [], "labels": []})
            done = ""
        # Tokens of the whole, as generation sees them: SentencePiece puts a space before a piece that stands alone.
        before, asked, answered = rows[-1]["input_ids"], ids_of(question), ids_of(text)
        if asked[: len(before)] == before and answered[: len(asked)] == asked:
            head, tail = asked[len(before) :], answered[len(asked) :]
        else:  # a token reaches over the border
            head, tail = ids_of(question[len(done) :]), ids_of(text[len(question) :])
        rows[-1]["input_ids"] += head + tail
        rows[-1]["labels"] += [IGNORED] * len(head) + tail
        done = text
    return rows


def collate(
    rows: Iterable[dict[str, list[int]]],
    *,
    pad_token_id: int,
    length: int | None = None,
    device: str = "cpu",
) -> dict[str, torch.Tensor]:
    """Right-pad rows to the longest, or to `length`: `input_ids` and `labels`, each [B, S].

    There is no attention mask: a causal model never looks to the right, where the padding is, and without a
    mask attention takes its fast path and does not repeat the KV heads.
    """
    rows = list(rows)
    longest = max((len(row["input_ids"]) for row in rows), default=0)
    if not longest or (length is not None and length < longest):
        raise ValueError(
            f"cannot pad {len(rows)} rows with at most {longest} tokens to length={length}"
        )
    length = length or longest

    def padded(values: list[list[int]], fill: int) -> torch.Tensor:
        return torch.tensor([v + [fill] * (length - len(v)) for v in values], device=device)

    ids, labels = [row["input_ids"] for row in rows], [row["labels"] for row in rows]
    return {"input_ids": padded(ids, pad_token_id), "labels": padded(labels, IGNORED)}


def batches(
    data: Any, *, batch_size: int, pad_token_id: int, length: int | None = None, device: str = "cpu"
) -> Iterator[dict[str, torch.Tensor]]:
    """Consecutive collated batches, over the data again and again: take as many as you need."""
    if batch_size < 1 or batch_size > len(data):
        raise ValueError(f"batch_size={batch_size}: give 1 to {len(data)}, the number of rows")
    while True:
        for start in range(0, len(data) - batch_size + 1, batch_size):
            rows = (data[i] for i in range(start, start + batch_size))
            yield collate(rows, pad_token_id=pad_token_id, length=length, device=device)


@torch.no_grad()
def evaluate(model: Any, data: Any, *, pad_token_id: int, batch_size: int = 8) -> float:
    """Held-out loss: the mean over all target tokens of `data`, in nats. Leaves the model's mode as it was."""
    was_training = model.training
    model.eval()
    total, targets = 0.0, 0
    for start in range(0, len(data), batch_size):
        rows = [data[i] for i in range(start, min(start + batch_size, len(data)))]
        batch = collate(rows, pad_token_id=pad_token_id, device=str(model.device))
        count = int((batch["labels"][:, 1:] != IGNORED).sum())
        total += model(**batch, use_cache=False).loss.item() * count
        targets += count
    model.train(was_training)
    return total / targets


def load_text(*, split: str = "train") -> str:
    """The sources of the standard library as one long text, module after module."""
    _check(split)
    return "\n\n".join(
        path.read_text(encoding="utf-8", errors="replace") for path in modules(split)
    )


def decode_with_mask(row: dict[str, list[int]], tokenizer: Any) -> str:
    """A row as text, with the parts that carry no loss between ⟦ and ⟧."""
    text = ""
    for masked, part in itertools.groupby(
        zip(row["input_ids"], row["labels"]), lambda pair: pair[1] == IGNORED
    ):
        piece = tokenizer.decode([token for token, _ in part])
        text += f"⟦{piece}⟧" if masked else piece
    return text


def _check(split: str) -> None:
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: choose one of {', '.join(SPLITS)}")


def _read(name: str, split: str) -> Iterator[dict[str, Any]]:
    """The checked rows of a JSON Lines file or of a data set of the hub."""
    if os.path.exists(name):
        lines = [
            line
            for line in enumerate(Path(name).read_text(encoding="utf-8").split("\n"), 1)
            if line[1].strip()
        ]
        if not lines:
            raise ValueError(
                f"{name} is empty (no rows): give lines with `prompt` and `completion`, or `messages`"
            )
        for number, line in lines:
            try:
                yield _pair(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{name}, line {number}: {error}") from error
        return
    from datasets import load_dataset

    try:
        rows = load_dataset(name, split=split)
    except (
        Exception
    ) as error:  # the client raises many types: a missing name, split, network or token
        raise ValueError(
            f"cannot load split {split!r} of the data set {name!r} ({error}): give the path of a .jsonl file with "
            f"`prompt` and `completion`, or a hub id that this machine can reach"
        ) from error
    yield from map(_pair, rows)


def _pair(row: dict[str, Any]) -> dict[str, Any]:
    """The columns that count, if they are what they should be."""
    if not isinstance(row, dict):
        raise ValueError(
            f"a row is {str(row)[:40]!r}: give an object with `prompt` and `completion`, or `messages`"
        )
    chat = row.get("messages")
    if chat is None and all(isinstance(row.get(name), str) for name in ("prompt", "completion")):
        return {"prompt": row["prompt"], "completion": row["completion"]}
    turns = chat if isinstance(chat, list) and all(isinstance(turn, dict) for turn in chat) else []
    if not turns or not all(
        isinstance(turn.get(name), str) for turn in turns for name in ("role", "content")
    ):
        raise ValueError(
            f"a row has the columns {sorted(row)}; the texts `prompt` and `completion` are needed (rename them), or "
            f"`messages`, a list of turns with the texts `role` and `content`"
        )
    return {"messages": chat}
