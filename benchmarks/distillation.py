"""A student with its teacher and without: held-out loss after equal steps, over several seeds.

python -m benchmarks.distillation

The student is SmolLM2 without some of its blocks: those with the least influence on text of the
training set go. Every way trains the same student on the same rows in the same order:

    labels     cross-entropy with the text
    teacher    half of the loss is the teacher's distribution

A seed decides which rows come, and in which order. The text is Python's own standard library, and
what is held out comes from other modules. On a CPU seconds are those of this thread, so other
programs on the machine disturb them little.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks import study
from recipes_lib.compression.distillation import apply_distillation
from recipes_lib.compression.student import block_influence, choose_blocks, make_student
from recipes_lib.core.data.losses_and_answers import row_losses
from recipes_lib.core.data.tokens_and_labels import Row
from recipes_lib.core.measure.machine import seed_everything
from recipes_lib.core.model import load_model, load_tokenizer
from recipes_lib.core.model.bytes_of_tensors import weight_bytes
from recipes_lib.core.model.default_model import model_source

WAYS = ("labels", "teacher")


@dataclass(frozen=True)
class Settings:
    """What is trained, and for how long. `steps` are those of each run."""

    seeds: int = 3
    steps: int = 44
    keep: int = 20  # blocks of the student
    rows: int = 2  # of a step
    seq: int = 256
    held_out: int = 8  # rows
    lr: float = 3e-4
    temperature: float = 1.0
    teacher_share: float = 0.5


def compare(settings: Settings) -> Iterator[dict[str, Any]]:
    """What there is after each run."""
    tokenizer = load_tokenizer()
    text = partial(study.text_rows, tokenizer, tokens=settings.seq)
    teacher = load_model()
    calibration = text("train", count=6)
    influence = block_influence(teacher, [study.batch_of([row]) for row in calibration])
    blocks = choose_blocks(influence, keep=settings.keep)
    held_out = text("validation", count=settings.held_out)
    pool = text("train", count=2 * settings.steps * settings.rows)

    student = make_student(teacher, blocks=blocks)
    content = {
        "source": model_source(),
        "influence": influence,
        "blocks": blocks,
        "teacher": held_out_loss(teacher, held_out),
        "untrained": held_out_loss(student, held_out),
        "weight_bytes": {"teacher": weight_bytes(teacher), "student": weight_bytes(student)},
        "runs": [],
    }
    for seed in range(settings.seeds):
        for way in WAYS:
            run = train(teacher, blocks, way, pool, held_out, settings=settings, seed=seed)
            content["runs"].append(run)
            yield content


def train(
    teacher: Any,
    blocks: Sequence[int],
    way: str,
    pool: Sequence[Row],
    held_out: Sequence[Row],
    *,
    settings: Settings,
    seed: int,
) -> dict[str, Any]:
    """One run: its held-out loss, and the seconds of its steps."""
    seed_everything(seed)
    student = student_of(teacher, blocks, way, settings)
    optimizer = torch.optim.AdamW(student.parameters(), lr=settings.lr, fused=True)
    seconds = study.train(
        student, optimizer, pool, steps=settings.steps, rows=settings.rows, seed=seed
    )
    return {"way": way, "seed": seed, "loss": held_out_loss(student, held_out), **seconds}


def student_of(teacher: Any, blocks: Sequence[int], way: str, settings: Settings) -> Any:
    """A fresh student, taught in this way."""
    student = make_student(teacher, blocks=blocks).train()
    if way == "labels":
        return student
    return apply_distillation(
        student,
        teacher,
        temperature=settings.temperature,
        teacher_share=settings.teacher_share,
    )


def held_out_loss(model: Any, rows: Sequence[Row]) -> float:
    """The mean loss over all targets of the rows, in nats."""
    losses, targets = row_losses(model, rows, pad_token_id=study.PAD, batch_size=2)
    return (losses.sum() / targets.sum()).item()


if __name__ == "__main__":
    study.run("distillation", Settings(), compare, about=__doc__)
