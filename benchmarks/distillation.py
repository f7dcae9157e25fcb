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
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from benchmarks.record import write_whole
from recipes_lib.compression.distillation import apply_distillation
from recipes_lib.compression.student import (
    block_influence,
    choose_blocks,
    make_student,
    pairs_of_blocks,
)
from recipes_lib.core.data import collate, load_text
from recipes_lib.core.data.chat import Row
from recipes_lib.core.data.evaluation import GREEDY, row_losses, text_windows
from recipes_lib.core.measure.machine import (
    machine,
    provenance,
    runs_dir,
    seed_everything,
    synchronize,
)
from recipes_lib.core.model import load_model, load_tokenizer
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.core.model.default_model import model_source
from recipes_lib.core.model.sizes import weight_bytes

WAYS = ("labels", "teacher", "teacher + hidden")
FILE = "distillation.json"
PAD = 0  # no row is padded


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


def compare(settings: Settings, *, minutes: float | None = None) -> Iterator[dict[str, Any]]:
    """Yield the content whenever there is more of it. `minutes` decide the steps, if given."""
    tokenizer = load_tokenizer()
    teacher = load_model()
    calibration = _rows(tokenizer, "train", settings, count=6)
    influence = block_influence(teacher, [_batch([row]) for row in calibration])
    blocks = choose_blocks(influence, keep=settings.keep, longest_gap=settings.longest_gap)
    held_out = _rows(tokenizer, "validation", settings, count=settings.held_out)
    if minutes is not None:
        steps = _steps_that_fit(teacher, blocks, held_out, settings, minutes=minutes)
        settings = replace(settings, steps=steps)
    pool = _rows(tokenizer, "train", settings, count=2 * settings.steps * settings.rows)

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
    yield content
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
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _warm_up_and_decay(settings.steps))
    order = random.Random(seed).sample(range(len(pool)), settings.steps * settings.rows)
    points = {_point(number, settings) for number in range(1, settings.evaluations + 1)}
    curve = []
    seconds = []
    for number in range(settings.steps):
        chosen = order[number * settings.rows : (number + 1) * settings.rows]
        start = _clock()
        step(student, optimizer, _batch([pool[i] for i in chosen]))
        seconds.append(_clock() - start)
        schedule.step()
        if number + 1 in points:
            curve.append([number + 1, held_out_loss(student, held_out)])
    return {
        "way": way,
        "seed": seed,
        "loss": curve[-1][1],
        "curve": curve,
        "seconds": sum(seconds),
        "seconds_per_step": statistics.median(seconds),
    }


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


def step(student: Any, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> float:
    """One step, in 16 bits where the machine has units for bf16. Returns the loss."""
    half = machine().native_bf16
    with torch.autocast(machine().device, torch.bfloat16, enabled=half):
        loss = student(**batch, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def held_out_loss(model: Any, rows: Sequence[Row]) -> float:
    """The mean loss over all targets of the rows, in nats."""
    losses, targets = row_losses(model, rows, pad_token_id=PAD, batch_size=2)
    return (losses.sum() / targets.sum()).item()


def decode_seconds(
    models: dict[str, Any], row: Row, *, new_tokens: int = 32, rounds: int = 3
) -> dict[str, float]:
    """Median seconds per token of HF's greedy `generate` after a prompt, in turns."""
    prompt = torch.tensor([row["input_ids"][:32]], device=machine().device)
    options = GREEDY | {"pad_token_id": PAD, "eos_token_id": None}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            start = _clock()
            model.eval().generate(
                prompt, **options, min_new_tokens=new_tokens, max_new_tokens=new_tokens
            )
            seconds[name].append((_clock() - start) / new_tokens)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _steps_that_fit(
    teacher: Any, blocks: Sequence[int], rows: Sequence[Row], settings: Settings, *, minutes: float
) -> int:
    """Steps of each run, so that all runs together take so many minutes of training."""
    of_all_ways = 0.0
    for way in settings.ways:
        student = student_of(teacher, blocks, way, settings)
        optimizer = torch.optim.AdamW(student.parameters(), lr=0.0, fused=True)
        batch = _batch(rows[: settings.rows])
        step(student, optimizer, batch)  # makes the states
        start = _clock()
        step(student, optimizer, batch)
        of_all_ways += _clock() - start
    return max(1, int(60 * minutes / (settings.seeds * of_all_ways)))


def _warm_up_and_decay(steps: int) -> Any:
    """Factors of the learning rate: up over a tenth of the steps, and then down to a tenth."""
    warm_up = max(1, steps // 10)

    def factor(number: int) -> float:
        rising = (number + 1) / warm_up
        falling = 1 - 0.9 * number / steps
        return min(1.0, rising) * falling

    return factor


def _point(number: int, settings: Settings) -> int:
    """Behind which step the evaluation of this number comes."""
    return settings.steps * number // settings.evaluations


def _rows(tokenizer: Any, split: str, settings: Settings, *, count: int) -> list[Row]:
    """`count` rows from evenly spaced pieces of the text."""
    return text_windows(tokenizer, text=load_text(split=split), context=settings.seq, windows=count)


def _batch(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    return collate(rows, pad_token_id=PAD, device=machine().device)


def _clock() -> float:
    """Seconds: of this thread on a CPU, of the wall on a GPU."""
    if machine().device == "cpu":
        return time.thread_time()
    synchronize()
    return time.perf_counter()


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


def main() -> None:
    """Run the comparison, and write the file after each run of a way."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, help="of training, of all runs together")
    parser.add_argument("--steps", type=int, default=Settings.steps, help="if no minutes are given")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(Settings.ways))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--file", default=FILE, help=f"in runs/; by default {FILE}")
    for name in ("seeds", "evaluations", "keep", "longest_gap", "rows", "seq", "held_out"):
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=getattr(Settings, name)
        )
    for name in ("lr", "temperature", "teacher_share", "hidden_weight"):
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=float, default=getattr(Settings, name)
        )
    given = vars(parser.parse_args())
    torch.set_num_threads(given.pop("threads"))
    minutes = given.pop("minutes")
    path = runs_dir() / given.pop("file")
    settings = Settings(**given | {"ways": tuple(given["ways"])})
    for content in compare(settings, minutes=minutes):
        write_whole(path, provenance() | content)
        print(summary(content), flush=True)
    print(path)


if __name__ == "__main__":
    main()
