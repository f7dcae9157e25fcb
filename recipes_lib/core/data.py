"""Real text without a download: Python's own standard library.

`load_instructions` gives instruction pairs (a function's source → its docstring), chat-formatted with
the model's template, with the loss on the answer only. `load_text` gives long running text. Both are
split by *module*, so no module is in training and in validation. A data set of the hub, a local JSON
Lines file or a list of pairs takes the same way.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import random
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

IGNORED = -100  # the label that the loss leaves out
INSTRUCTION = "Write the docstring of this Python function.\n\n"
SPLITS = ("train", "validation")
# Not text of the library proper: tests, generated tables, installed packages.
_SKIP = ("test", "tests", "idle_test", "site-packages", "lib2to3", "encodings", "pydoc_data", "ensurepip", "turtledemo")


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
        found = tokenize_chat(tokenizer, chat) if chat else [tokenize_pair(tokenizer, **pair)]
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
    *, split: str = "train", dataset: str | Iterable[dict[str, str]] | None = None
) -> Iterator[dict[str, str]]:
    """The pairs of `load_instructions`, with its errors, as text: `prompt` and `completion`, or `messages`."""
    _check(split)
    if dataset is None:
        yield from _docstring_pairs(split)
        return
    if split != "train" and (not isinstance(dataset, str) or os.path.exists(dataset)):
        raise ValueError(
            f"split={split!r}: these pairs have no splits, so give the held-out ones as a data set of theirs"
        )
    for row in _load(dataset, split) if isinstance(dataset, str) else dataset:
        if row.get("messages"):
            yield {"messages": row["messages"]}
            continue
        if not {"prompt", "completion"} <= set(row):
            raise ValueError(f"a row has the columns {sorted(row)}; `prompt` and `completion` are needed: rename them")
        if str(row["completion"]).strip():
            yield {"prompt": row["prompt"], "completion": row["completion"]}


def tokenize_pair(tokenizer: Any, prompt: str, completion: str) -> dict[str, list[int]]:
    """One chat-formatted pair; `labels` is IGNORED on everything but the answer and its end mark."""
    if getattr(tokenizer, "chat_template", None):
        chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        return tokenize_chat(tokenizer, chat)[0]
    if not completion.strip():
        raise ValueError("the completion is empty: there would be nothing to learn from this pair")
    head = tokenizer(f"{prompt}\n\n", add_special_tokens=False)["input_ids"]
    tail = tokenizer(f"{completion}{tokenizer.eos_token or ''}", add_special_tokens=False)["input_ids"]
    return {"input_ids": head + tail, "labels": [IGNORED] * len(head) + tail}


def tokenize_chat(tokenizer: Any, messages: list[dict[str, str]]) -> list[dict[str, list[int]]]:
    """A conversation as rows with `input_ids` and `labels`, the loss on every answer and its end mark.

    One row, if the template leaves earlier turns as they were. Some rewrite them (Qwen3 drops the thinking of earlier
    answers): then each answer is a row of its own, after the history that the model will see in use.
    The labels are *not* shifted: Hugging Face models shift them inside, and doing it twice is a silent bug.
    Raises ValueError for a conversation without an answer, an empty answer, and a template that changes the question
    once it is answered.
    """
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers or not all(str(messages[i]["content"]).strip() for i in answers):
        raise ValueError("the completion is empty, or there is none: there would be nothing to learn from this chat")
    rows, done = [], ""  # the rows, and the text that the last one holds
    for i in answers:
        question = tokenizer.apply_chat_template(messages[:i], tokenize=False, add_generation_prompt=True)
        # The template's line break after the end mark is not learnt: generation stops at the mark.
        text = tokenizer.apply_chat_template(messages[: i + 1], tokenize=False).rstrip("\n")
        if not text.startswith(question):
            raise ValueError("the chat template rewrites the question once it is answered: the answer cannot be masked")
        if not rows or not question.startswith(done):
            rows.append({"input_ids": [], "labels": []})
            done = ""
        head = tokenizer(question[len(done) :], add_special_tokens=False)["input_ids"]
        tail = tokenizer(text[len(question) :], add_special_tokens=False)["input_ids"]
        rows[-1]["input_ids"] += head + tail
        rows[-1]["labels"] += [IGNORED] * len(head) + tail
        done = text
    return rows


def collate(
    rows: Iterable[dict[str, list[int]]], *, pad_token_id: int, length: int | None = None, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Right-pad rows to the longest, or to `length`: `input_ids` and `labels`, each [B, S].

    There is no attention mask: a causal model never looks to the right, where the padding is, and without a
    mask attention takes its fast path and does not repeat the KV heads.
    """
    rows = list(rows)
    longest = max((len(row["input_ids"]) for row in rows), default=0)
    if not longest or (length is not None and length < longest):
        raise ValueError(f"cannot pad {len(rows)} rows with at most {longest} tokens to length={length}")
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
    return "\n\n".join(path.read_text(encoding="utf-8", errors="replace") for path in _modules(split))


def decode_with_mask(row: dict[str, list[int]], tokenizer: Any) -> str:
    """A row as text, with the part that carries no loss between ⟦ and ⟧."""
    start = next(i for i, label in enumerate(row["labels"]) if label != IGNORED)
    return f"⟦{tokenizer.decode(row['input_ids'][:start])}⟧{tokenizer.decode(row['input_ids'][start:])}"


def _check(split: str) -> None:
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: choose one of {', '.join(SPLITS)}")


def _modules(split: str) -> list[Path]:
    """Source files of one split. A module or package belongs to one split by the hash of its name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if any(part in _SKIP or part.startswith("test_") for part in parts):
            continue
        held_out = hashlib.sha256(parts[0].encode()).digest()[0] % 8 == 0
        if held_out == (split == "validation"):
            found.append(path)
    return found


@functools.lru_cache(maxsize=2)
def _docstring_pairs(split: str) -> tuple[dict[str, str], ...]:
    """Functions with a docstring: the source without it is the prompt, its first paragraph the completion."""
    pairs = []
    for path in _modules(split):
        source = path.read_text(encoding="utf-8", errors="replace")
        try:
            tree = ast.parse(source)
        except SyntaxError:  # templates and Python 2 left-overs
            continue
        lines = source.splitlines()
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or len(node.body) < 2:
                continue
            completion = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            if len(completion.split()) < 4:  # "Helper." says nothing about the code
                continue
            code = lines[node.lineno - 1 : node.body[0].lineno - 1] + lines[node.body[0].end_lineno : node.end_lineno]
            code = "\n".join(line.removeprefix(" " * node.col_offset) for line in code)
            pairs.append({"prompt": INSTRUCTION + code, "completion": completion})
    # Some functions stand in two modules: once is enough, and one that is held out is not trained on.
    held_out = set() if split == "validation" else {pair["prompt"] for pair in _docstring_pairs("validation")}
    unique = [pair for prompt, pair in {p["prompt"]: p for p in pairs}.items() if prompt not in held_out]
    random.Random(0).shuffle(unique)
    return tuple(unique)


def _load(name: str, split: str) -> Any:
    from datasets import load_dataset

    try:
        if os.path.exists(name):
            return load_dataset("json", data_files=name, split="train")
        return load_dataset(name, split=split)
    except Exception as error:  # the client raises many types: a missing name, split, network or token
        raise ValueError(
            f"cannot load split {split!r} of the data set {name!r} ({str(error) or 'no rows'}): give the path of "
            f"a .jsonl file with `prompt` and `completion`, or a hub id that this machine can reach"
        ) from error
