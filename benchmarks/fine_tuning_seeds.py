"""Does another seed change what notebook 05 says? Its task and its loop, once more for each seed.

python -m benchmarks.fine_tuning_seeds

A seed decides the order of the pairs, and the numbers that adapters begin with. As in the notebook,
adapters are added to the weights before a model is examined.
"""

from __future__ import annotations

import functools
import itertools
import math
import pydoc_data.topics
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import get_cosine_schedule_with_warmup

from benchmarks import study
from recipes_lib.core.data import load_instructions
from recipes_lib.core.data.chat_template import CHATML
from recipes_lib.core.data.losses_and_answers import generate_answers, text_windows
from recipes_lib.core.data.ordinary_questions import (
    capitals_named,
    ordinary_questions,
    whole_sentences,
)
from recipes_lib.core.data.reminder_task import reminder_pairs
from recipes_lib.core.data.tokens_and_labels import Row
from recipes_lib.core.measure.machine import machine, seed_everything
from recipes_lib.core.model import load_model, load_tokenizer
from recipes_lib.fine_tuning.honest_evaluation import held_out_losses
from recipes_lib.fine_tuning.lora import apply_lora
from recipes_lib.fine_tuning.qlora import apply_qlora, merge_qlora
from recipes_lib.precision.mixed_precision import mixed_precision


@dataclass(frozen=True)
class Way:
    """The adapters, the rate, how often a pair is seen, rows of source code in each step, the
    rank, the layers that have adapters, and whether each step has an answer of the model's own.
    """

    adapters: str
    rate: float
    passes: int
    source_code: int = 0
    rank: int = 16
    layers: str = "all-linear"
    own_answers: bool = False


WAYS = {
    "LoRA": Way("lora", 3e-4, 2),
    "LoRA, longer": Way("lora", 3e-4, 4),
    "LoRA, with source code": Way("lora", 3e-4, 2, source_code=1),
    "LoRA, with source code, longer": Way("lora", 3e-4, 4, source_code=1),
    "LoRA, small rate": Way("lora", 1e-4, 2),
    "LoRA, large rate": Way("lora", 1e-3, 1),
    "LoRA, rank 4": Way("lora", 3e-4, 2, rank=4),
    "LoRA, rank 64": Way("lora", 3e-4, 2, rank=64),
    "LoRA, attention alone": Way("lora", 3e-4, 2, layers="attention"),
    "QLoRA": Way("qlora", 3e-4, 2),
    # Embedding and norms in 32 bits, as peft's `prepare_model_for_kbit_training` leaves them.
    "QLoRA, the rest in 32 bits": Way("qlora on fp32", 3e-4, 2),
    "full fine-tuning": Way("none", 1e-4, 1),
    "full fine-tuning, small rate": Way("none", 3e-5, 2),
}
OTHER = 64  # tokens of a row of other text
OWN = 40  # tokens of an answer of the model's own, at most
WATCHED = 32  # held-out pairs that the notebook looks at while it trains; those behind them judge


@dataclass(frozen=True)
class Task:
    """Pairs with one right answer, and the ways that are tried on them."""

    name: str  # of the file in runs/
    pairs: Callable[..., list[dict[str, str]]]  # split=, limit= -> `prompt` and `completion`
    ways: dict[str, Way]


REMINDERS = Task("fine_tuning_seeds", reminder_pairs, WAYS)


@dataclass(frozen=True)
class Settings:
    """What is trained. The notebook has seed 0, and the pairs in the order of the task."""

    model: str = "smollm2"
    seeds: tuple[int, ...] = (1, 2, 3)
    pairs: int = 480
    held_out: int = 64
    rows: int = 4  # pairs in a step


def compare(settings: Settings, task: Task = REMINDERS) -> Iterator[dict[str, Any]]:
    """What there is after each run. What was cut goes on after its last one."""
    content = study.cut_short(task.name, settings)
    if content is None:
        content = {"before": examined(load_model(settings.model), settings, task), "runs": []}
    done = {(run["way"], run["seed"]) for run in content["runs"]}
    for seed, way in itertools.product(settings.seeds, task.ways):
        if (way, seed) not in done:
            content["runs"].append(trained(way, settings, task, seed=seed))
        yield content


def trained(name: str, settings: Settings, task: Task = REMINDERS, *, seed: int) -> dict[str, Any]:
    """One run, examined."""
    way = task.ways[name]
    pairs = task.pairs(split="train", limit=settings.pairs)
    tokenizer = tokenizer_of(settings.model)
    rows = list(load_instructions(tokenizer, dataset=pairs))
    random.Random(seed).shuffle(rows)
    size = settings.rows
    steps = [rows[start : start + size] for start in range(0, len(rows), size)]
    if way.own_answers:
        own = own_answers(settings.model, len(steps))
        steps = [[*step, row] for step, row in zip(steps, itertools.cycle(own))]
    steps = way.passes * steps
    also = way.source_code
    if also:
        # Of other modules than those whose perplexity is asked for.
        code = study.text_rows(tokenizer, "train", tokens=OTHER, count=also * len(steps))
        random.Random(seed).shuffle(code)
        parts = [code[start : start + also] for start in range(0, len(code), also)]
        steps = [step + part for step, part in zip(steps, parts, strict=True)]

    seed_everything(seed)
    half = machine().compute_dtype
    chosen = {"rank": way.rank, "target_modules": way.layers}
    if way.adapters == "lora":
        model = apply_lora(load_model(settings.model, dtype=half), **chosen)
    elif way.adapters == "qlora":
        model = load_model(settings.model, dtype=half)
        model = apply_qlora(model, compute_dtype=half, **chosen)
    elif way.adapters == "qlora on fp32":
        model = apply_qlora(load_model(settings.model), compute_dtype=half, **chosen)
    else:
        model = load_model(settings.model)
    weights = [weight for weight in model.train().parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=way.rate, weight_decay=0.0, fused=True)
    schedule = get_cosine_schedule_with_warmup(optimizer, len(steps) // 10, len(steps))
    for step in steps:
        study.train_step(model, optimizer, study.batch_of(step))
        schedule.step()
    if way.adapters == "lora":
        model = model.merge_and_unload()
    if way.adapters.startswith("qlora"):
        model = merge_qlora(model)
    facts = {"way": name, "seed": seed, "lr": way.rate, "steps": len(steps)}
    return facts | examined(model, settings, task)


@functools.cache
def own_answers(name: str, count: int) -> list[Row]:
    """What the pretrained model says to ordinary questions, up to the last whole sentence."""
    tokenizer = tokenizer_of(name)
    model = load_model(name, dtype=machine().compute_dtype)
    questions = ordinary_questions()[:count]
    answers = generate_answers(model, tokenizer, questions, max_new_tokens=OWN, batch_size=64)
    pairs = []
    for question, answer in zip(questions, map(whole_sentences, answers), strict=True):
        if answer:
            pairs.append({"prompt": question, "completion": answer})
    return list(load_instructions(tokenizer, dataset=pairs))


def examined(model: Any, settings: Settings, task: Task = REMINDERS) -> dict[str, Any]:
    """How many answers are right, their loss, the perplexity of source code and of prose, how many
    ordinary questions are answered in braces, and how many capitals are named.
    """
    tokenizer = tokenizer_of(settings.model)
    pairs = task.pairs(split="validation", limit=WATCHED + settings.held_out)[WATCHED:]
    questions = list(load_instructions(tokenizer, dataset=pairs))
    code = study.text_rows(tokenizer, "validation", tokens=OTHER, count=32)
    manual = "\n\n".join(pydoc_data.topics.topics.values())
    prose = text_windows(tokenizer, text=manual, context=OTHER, windows=32)
    padded = {"pad_token_id": study.PAD, "batch_size": 32}
    with mixed_precision().autocast():
        answers = generate_answers(model, tokenizer, questions, batch_size=64)
        loss = held_out_losses(model, questions, **padded).mean
        perplexity = math.exp(held_out_losses(model, code, **padded).mean)
        of_prose = math.exp(held_out_losses(model, prose, **padded).mean)
        ordinary = generate_answers(
            model, tokenizer, ordinary_questions(split="validation"), batch_size=64
        )
    right = sum(answer == pair["completion"] for answer, pair in zip(answers, pairs, strict=True))
    return {
        "right": right,
        "loss": loss,
        "perplexity": perplexity,
        "prose": of_prose,
        "braces": sum(answer.startswith("{") for answer in ordinary),
        "capitals": capitals_named(ordinary),
    }


def tokenizer_of(name: str) -> Any:
    tokenizer = load_tokenizer(name)
    tokenizer.chat_template = CHATML  # its own, without the system turn that it adds
    return tokenizer


if __name__ == "__main__":
    study.run("fine_tuning_seeds", Settings(), compare, about=__doc__)
