"""What the programs of this folder share: their options, and a file in runs/ that grows.

    study.run("muon", Settings(), compare, about=__doc__)

Every field of the settings is an option of the command line. The file is written after each thing
that was measured, and the table that it becomes is printed, so a run that is cut leaves what it
has. The file says `complete` only when the whole run in full size has ended, and
`benchmarks.record` takes no other.

What several programs measure in the same way is here, too: seconds, and a short training.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import keep, write_whole
from recipes_lib.core.data import collate, load_text
from recipes_lib.core.data.chat import Row
from recipes_lib.core.data.evaluation import text_windows
from recipes_lib.core.measure.machine import machine, synchronize
from recipes_lib.core.measure.provenance import provenance, runs_dir

# What has to be the same for parts that stand in one file.
SAME = ("name", "native_bf16", "date", "fast", "short")
PAD = 0  # no row is padded
# The blocks of `templates/tables.j2` that a program fills, where they have other names.
BLOCKS = {
    "architecture": ("architecture", "healing", "norms"),
    "image_students": ("students",),
    "int8_images": ("int8",),
    "inference_peers": ("peers",),
    "quantization_aware": ("grids",),
}

Content = dict[str, Any]
# (settings, options) -> what there is to write, again and again
Measured = Callable[[Any, argparse.Namespace], Iterator[Content]]

# --- the command ----------------------------------------------------------------------------------


def run(
    name: str,
    settings: Any,
    measured: Measured,
    *,
    about: str,
    arguments: Sequence[str] | None = None,
    parts: Sequence[str] = (),
    short: Any = None,
    minutes: bool = False,
) -> Path:
    """Measure, write `runs/<name>.json` after each step, and return where it is.

    Args:
        settings: a dataclass with everything that can be chosen.
        about: what the program does; the first line is for `--help`.
        arguments: of the command line; None takes those that the program was called with.
        parts: that can be measured one by one with `--parts`.
        short: the settings of `--short`.
        minutes: whether the time can be limited with `--minutes`.
    Raises ValueError if only some parts run and the others in the file are of another machine or
    day.
    """
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    if minutes:
        parser.add_argument("--minutes", type=float, help="of all runs together")
    if parts:
        parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    if short is not None:
        parser.add_argument("--short", action="store_true", help="small sizes")
    _add_settings(parser, settings)
    options = parser.parse_args(arguments)
    is_short = getattr(options, "short", False)
    if is_short:
        settings = short
    chosen = {field.name: getattr(options, field.name) for field in fields(settings)}
    settings = replace(settings, **{name: v for name, v in chosen.items() if v is not None})

    path = runs_dir() / f"{name}.json"
    facts = provenance() | {"short": is_short}
    content = facts | {"settings": asdict(settings), "complete": False}
    if parts:
        content |= parts_to_keep(path, facts, [part for part in parts if part not in options.parts])
    torch.set_num_threads(1)
    for found in measured(settings, options):
        content |= found
        save(path, content)
        print(*filter(None, tables(name, content)), sep="\n\n", flush=True)
    content["complete"] = not is_short and all(part in content for part in parts)
    save(path, content)
    print(path)
    return path


def _add_settings(parser: argparse.ArgumentParser, settings: Any) -> None:
    for field in fields(settings):
        default = getattr(settings, field.name)
        kind = type(default)
        many = {}
        if isinstance(default, tuple):
            kind = type(default[0])
            many = {"nargs": "+"}
        option = f"--{field.name.replace('_', '-')}"
        # No default: the settings may be those of `--short`.
        parser.add_argument(option, type=kind, **many, help=f"by default {default}")


def save(path: Path, content: Content) -> None:
    """Write a file of JSON whole or not at all."""
    write_whole(path, json.dumps(content, indent=1) + "\n")


def tables(name: str, content: Content) -> Iterator[str]:
    """What the texts will show of it, as far as it goes."""
    from benchmarks.render import block  # here: it takes long to import

    with tempfile.TemporaryDirectory() as folder:
        keep(name, content, facts=content, folder=Path(folder))
        for key in BLOCKS.get(name, (name,)):
            # A look at the numbers ends no measurement: a table may want what is not there yet.
            with contextlib.suppress(Exception):
                yield block(key, folder=Path(folder))


def parts_to_keep(path: Path, facts: Content, parts: Sequence[str]) -> Content:
    """Those of `parts` that the file holds and that do not run again.

    Raises ValueError where it is not of this machine and day: its parts would get the date of
    today.
    """
    older: Content = {}
    if path.exists():
        older = json.loads(path.read_text(encoding="utf-8"))
    kept = {part: older[part] for part in parts if part in older}
    for key in SAME:
        if kept and older.get(key) != facts.get(key):
            raise ValueError(
                f"{path} holds {', '.join(kept)} with {key} {older.get(key)}, and now it is "
                f"{facts.get(key)}: run all parts, or move the file away"
            )
    return kept


# --- the clock ------------------------------------------------------------------------------------


def clock() -> float:
    """Seconds of this thread on a CPU, so other programs disturb it little; else of the wall."""
    if machine().device == "cpu":
        return time.thread_time()
    synchronize()
    return time.perf_counter()


# --- a short training on text ---------------------------------------------------------------------


def text_rows(tokenizer: Any, split: str, *, tokens: int, count: int) -> list[Row]:
    """`count` rows from evenly spaced pieces of Python's standard library."""
    return text_windows(tokenizer, text=load_text(split=split), context=tokens, windows=count)


def batch_of(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    return collate(rows, pad_token_id=PAD, device=machine().device)


def train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    pool: Sequence[Row],
    *,
    steps: int,
    rows: int,
    seed: int,
) -> dict[str, float]:
    """`steps` steps on rows that the seed chooses from the pool. Gives the seconds that they took.

    The rate rises over a tenth of the steps, and then falls to a tenth.
    """
    warm_up = max(1, steps // 10)

    def factor(number: int) -> float:
        return min(1.0, (number + 1) / warm_up) * (1 - 0.9 * number / steps)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    order = random.Random(seed).sample(range(len(pool)), steps * rows)
    seconds = []
    for number in range(steps):
        batch = batch_of([pool[i] for i in order[number * rows : (number + 1) * rows]])
        start = clock()
        train_step(model, optimizer, batch)
        seconds.append(clock() - start)
        schedule.step()
    return {"seconds": sum(seconds), "seconds_per_step": statistics.median(seconds)}


def train_step(
    model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]
) -> None:
    """One step, in 16 bits where the machine has units for bf16."""
    half = machine().native_bf16
    with torch.autocast(machine().device, torch.bfloat16, enabled=half):
        loss = model(**batch, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def steps_that_fit(
    models: Sequence[Callable[[], Any]], batch: dict[str, torch.Tensor], *, seconds: float
) -> int:
    """Steps of each run, so that one run of every model takes so many seconds together."""
    of_all = 0.0
    for make in models:
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
        train_step(model, optimizer, batch)  # makes the states
        start = clock()
        train_step(model, optimizer, batch)
        of_all += clock() - start
    return max(1, int(seconds / of_all))
