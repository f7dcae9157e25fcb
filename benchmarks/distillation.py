"""A student with its teacher and without: held-out loss after equal steps, over several seeds.

python -m benchmarks.distillation --minutes 20

The student is SmolLM2 without some of its blocks: those with the least influence on text of the
training set go. Every way trains the same student on the same rows in the same order:

    labels             cross-entropy with the text
    teacher            half of the loss is the teacher's distribution
    teacher + hidden   and the outputs of the blocks are brought together with the teacher's

A seed decides which rows come, and in which order. Each way of each seed takes as many steps: those
that fit into the minutes, after a step of each way has been timed. The text is Python's own
standard library, and what is held out comes from other modules. On a CPU seconds are those of this
thread, so other programs on the machine disturb them little.

`runs/distillation.json` is written after each run of a way, so a run that is cut leaves what it
has.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks import study
from recipes_lib.compression.distillation import apply_distillation
from recipes_lib.compression.student import (
    block_influence,
    choose_blocks,
    make_student,
    pairs_of_blocks,
)
from recipes_lib.core.data.chat import Row
from recipes_lib.core.data.evaluation import GREEDY, row_losses
from recipes_lib.core.measure.machine import machine, seed_everything
from recipes_lib.core.model import load_model, load_tokenizer
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.core.model.default_model import model_source
from recipes_lib.core.model.sizes import weight_bytes

WAYS = ("labels", "teacher", "teacher + hidden")


@dataclass(frozen=True)
class Settings:
    """What is trained, and for how long. `steps` are those of each run."""

    ways: tuple[str, ...] = ("labels", "teacher")
    seeds: int = 3
    steps: int = 8
    evaluations: int = 1  # held-out losses of a run, the last one behind its last step
    keep: int = 20  # blocks of the student
    longest_gap: int | None = None
    rows: int = 2  # of a step
    seq: int = 256
    held_out: int = 8  # rows
    lr: float = 3e-4
    temperature: float = 1.0
    teacher_share: float = 0.5
    hidden_weight: float = 1.0


def compare(
    settings: Settings, options: argparse.Namespace, older: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """What there is after each run. `options.minutes` decide the steps, if given."""
    tokenizer = load_tokenizer()
    text = partial(study.text_rows, tokenizer, tokens=settings.seq)
    teacher = load_model()
    calibration = text("train", count=6)
    influence = block_influence(teacher, [study.batch_of([row]) for row in calibration])
    blocks = choose_blocks(influence, keep=settings.keep, longest_gap=settings.longest_gap)
    held_out = text("validation", count=settings.held_out)
    if options.minutes is not None:
        students = [partial(student_of, teacher, blocks, way, settings) for way in settings.ways]
        seconds = 60 * options.minutes / settings.seeds
        batch = study.batch_of(held_out[: settings.rows])
        settings = replace(settings, steps=study.steps_that_fit(students, batch, seconds=seconds))
    pool = text("train", count=2 * settings.steps * settings.rows)

    student = make_student(teacher, blocks=blocks)
    content = {
        "source": model_source(),
        "settings": asdict(settings),
        "influence": influence,
        "blocks": blocks,
        "teacher": held_out_loss(teacher, held_out),
        "untrained": held_out_loss(student, held_out),
        "weight_bytes": {"teacher": weight_bytes(teacher), "student": weight_bytes(student)},
        "decode": decode_seconds({"teacher": teacher, "student": student}, held_out[0]),
        "runs": [],
    }
    for seed in range(settings.seeds):
        for way in settings.ways:
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
    """One run: its held-out losses, and the seconds of its steps without those of the losses."""
    seed_everything(seed)
    student = student_of(teacher, blocks, way, settings)
    optimizer = torch.optim.AdamW(student.parameters(), lr=settings.lr, fused=True)
    evaluations = range(1, settings.evaluations + 1)
    points = {settings.steps * number // settings.evaluations for number in evaluations}
    curve = []

    def evaluate(number: int) -> None:
        if number in points:
            curve.append([number, held_out_loss(student, held_out)])

    seconds = study.train(
        student,
        optimizer,
        pool,
        steps=settings.steps,
        rows=settings.rows,
        seed=seed,
        after_step=evaluate,
    )
    return {"way": way, "seed": seed, "loss": curve[-1][1], "curve": curve, **seconds}


def student_of(teacher: Any, blocks: Sequence[int], way: str, settings: Settings) -> Any:
    """A fresh student, taught in this way."""
    student = make_student(teacher, blocks=blocks).train()
    if way == "labels":
        return student
    pairs = []
    if way == "teacher + hidden":
        pairs = pairs_of_blocks(blocks, of=len(decoder_blocks(teacher)))
    return apply_distillation(
        student,
        teacher,
        temperature=settings.temperature,
        teacher_share=settings.teacher_share,
        block_pairs=pairs,
        hidden_weight=settings.hidden_weight,
    )


def held_out_loss(model: Any, rows: Sequence[Row]) -> float:
    """The mean loss over all targets of the rows, in nats."""
    losses, targets = row_losses(model, rows, pad_token_id=study.PAD, batch_size=2)
    return (losses.sum() / targets.sum()).item()


def decode_seconds(
    models: dict[str, Any], row: Row, *, new_tokens: int = 32, rounds: int = 3
) -> dict[str, float]:
    """Median seconds per token of HF's greedy `generate` after a prompt, in turns."""
    prompt = torch.tensor([row["input_ids"][:32]], device=machine().device)
    options = GREEDY | {"pad_token_id": study.PAD, "eos_token_id": None}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            start = study.clock()
            model.eval().generate(
                prompt, **options, min_new_tokens=new_tokens, max_new_tokens=new_tokens
            )
            seconds[name].append((study.clock() - start) / new_tokens)
    return {name: statistics.median(values) for name, values in seconds.items()}


def summary(content: dict[str, Any]) -> str:
    """A line per way: its held-out losses over the seeds, and what a step takes."""
    lines = [
        f"held-out loss: teacher {content['teacher']:.3f}, "
        f"student before training {content['untrained']:.3f}, "
        f"{content['settings']['steps']} steps of each run"
    ]
    for way in content["settings"]["ways"]:
        runs = [run for run in content["runs"] if run["way"] == way]
        if not runs:
            continue
        losses = [run["loss"] for run in runs]
        each = ", ".join(f"{loss:.3f}" for loss in losses)
        seconds = statistics.median(run["seconds_per_step"] for run in runs)
        mean = statistics.fmean(losses)
        lines.append(f"{way:<18}{mean:.3f} ({each})   {seconds:.2f} s per step")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparison, and write the file after each run of a way."""
    study.run(
        "distillation",
        Settings(),
        compare,
        about=__doc__,
        arguments=arguments,
        choices={"ways": WAYS},
        minutes=True,
        summary=summary,
    )


if __name__ == "__main__":
    main()
