"""The same weights through other programs, in turns with ours, on one thread of one core.

python -m benchmarks.inference_peers

Every program writes the same number of tokens after the same short prompt, always the likeliest
one. Its time per token is that of a text less that of its first token, so reading the prompt is not
in it. Then it reads a long prompt, and gives the logits of the last token. The programs take turns,
each round in the other direction, and a ratio is that of two times in one round. Before the clock
runs, each program has written its text once, and `equal_tokens` says how many of its tokens are
those of `model.generate` in fp32, counted from the first.

What is not installed is left out, and said. Programs beside PyTorch come with

    pip install "llm-training-recipes[peers]"
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks import study
from benchmarks.peer_llama_cpp import llama_cpp_formats
from benchmarks.peer_programs import Loaded, Peer, load_transformers, programs_on_pytorch
from recipes_lib.core.data import load_text
from recipes_lib.core.measure import there_and_back, timed
from recipes_lib.core.model import load_tokenizer
from recipes_lib.core.model.default_model import model_source
from recipes_lib.report.ladders.speed import Writing, equal_tokens

QUESTION = "Explain to a child why the sky is blue."  # as in notebook 03


@dataclass(frozen=True)
class Settings:
    """How much is written and read, and how often."""

    new_tokens: int = 48
    rounds: int = 5
    prompt: int = 512  # tokens of the long text


@dataclass
class Row:
    """A program, how many of its tokens are the right ones, and the milliseconds of each round."""

    peer: Peer
    loaded: Loaded
    writing: Writing
    equal_tokens: int
    decode: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)


def compare(
    peers: Sequence[Peer],
    *,
    question: list[int],
    new_tokens: int,
    long_text: list[int],
    reference: Callable[[], Loaded],
    rounds: int,
) -> Iterator[list[Row]]:
    """Yield the rows after each round, and once before the first.

    Args:
        question: to answer with so many new tokens.
        long_text: to read.
        reference: loads the program whose tokens are the right ones.
    """
    right = reference().write(question, new_tokens)
    rows = {}
    for peer in peers:
        try:
            loaded = peer.load()
        except (ImportError, ValueError) as error:  # not installed, or a file is not here
            print(f"left out: {peer.name}: {error}", flush=True)
            continue
        writing = Writing(partial(partial, loaded.write, question), new_tokens)
        loaded.read(long_text)  # warms up
        rows[peer.name] = Row(peer, loaded, writing, equal_tokens(writing.tokens, right))
    yield list(rows.values())
    for names in there_and_back(list(rows), rounds=rounds):
        for name in names:
            row = rows[name]
            row.decode.append(1e3 * row.writing()["seconds_per_token"])
            seconds, _ = timed(partial(row.loaded.read, long_text))
            row.prefill.append(1e3 * seconds)
        yield list(rows.values())


# --- the file -------------------------------------------------------------------------------------


def contents(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as they are written into the file."""
    by_name = {row.peer.name: row for row in rows}
    found = []
    for row in rows:
        content = {
            "name": row.peer.name,
            "version": row.loaded.version,
            "bits": row.peer.bits,
            "decode_ms": spread(row.decode),
            "prefill_ms": spread(row.prefill),
            "beside": row.peer.beside,
            "equal_tokens": row.equal_tokens,
        }
        beside = by_name.get(row.peer.beside)
        if beside is not None:
            content["ratio"] = spread(ratios(row.decode, beside.decode))
            content["prefill_ratio"] = spread(ratios(row.prefill, beside.prefill))
        found.append(content)
    return found


def ratios(times: Sequence[float], others: Sequence[float]) -> list[float]:
    """Each time over the other time of the same round."""
    return [time / other for time, other in zip(times, others, strict=True)]


def spread(values: Sequence[float]) -> dict[str, Any] | None:
    """Median, smallest and largest, and the value of each round; None without values."""
    if not values:
        return None
    ends = {"low": min(values), "high": max(values)}
    return {"median": statistics.median(values), **ends, "rounds": list(values)}


# --- the run --------------------------------------------------------------------------------------


def all_programs() -> list[Peer]:
    """Every row of the table, in its order."""
    return [*programs_on_pytorch(), *llama_cpp_formats()]


def measured(settings: Settings) -> Iterator[dict[str, Any]]:
    """The rows after each round."""
    if hasattr(os, "sched_setaffinity"):  # all programs run on one core
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    tokenizer = load_tokenizer()
    question = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    # A token has a few letters, so ten letters for each of them are enough text.
    text = load_text(split="validation")[: 10 * settings.prompt + 1_000]
    long_text = tokenizer(text)["input_ids"][: settings.prompt]
    facts = {
        "source": model_source(),
        "new_tokens": settings.new_tokens,
        "decode_after_tokens": len(question),
        "prefill_tokens": len(long_text),
    }
    rounds = compare(
        all_programs(),
        question=question,
        new_tokens=settings.new_tokens,
        long_text=long_text,
        reference=partial(load_transformers, torch.float32),
        rounds=settings.rounds,
    )
    for done, rows in enumerate(rounds):
        yield facts | {"rounds": done, "rows": contents(rows)}


if __name__ == "__main__":
    study.run("inference_peers", Settings(), measured, about=__doc__)
