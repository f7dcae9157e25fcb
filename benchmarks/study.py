"""What the programs of this folder share: their options, and a file in runs/ that grows.

    study.run("muon", Settings(), compare, about=__doc__)

Every field of the settings is an option of the command line. The file is written after each thing
that was measured, and the table that it becomes is printed, so a run that is cut leaves what it
has. The file says `complete` only when the whole run has ended, and `benchmarks.record` takes no
other.

A program of hours goes on from there (`cut_short`).

What several programs measure in the same way is here, too: calls in turns, and a short training.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import keep, write_whole
from recipes_lib.core.data import collate, load_text
from recipes_lib.core.data.losses_and_answers import text_windows
from recipes_lib.core.data.tokens_and_labels import Row
from recipes_lib.core.measure.machine import machine
from recipes_lib.core.measure.provenance import provenance, runs_dir
from recipes_lib.report.ladders.edge import Calls
from recipes_lib.workflows.bench.kernels import now

PAD = 0  # any token does: padding is at the right and has no label
# The block of `templates/tables.j2` that a program fills, where it has another name.
BLOCKS = {
    "image_students": "students",
    "int8_images": "int8",
    "inference_peers": "peers",
    "quantization_aware": "grids",
}

Content = dict[str, Any]
Measured = Callable[[Any], Iterator[Content]]  # settings -> what there is to write, again and again

# --- the command ----------------------------------------------------------------------------------


def run(
    name: str,
    settings: Any,
    measured: Measured,
    *,
    about: str,
    arguments: Sequence[str] | None = None,
    threads: int = 1,
) -> Path:
    """Measure, write `runs/<name>.json` after each step, and return where it is.

    Args:
        settings: a dataclass with everything that can be chosen.
        about: what the program does; the first line is for `--help`.
        arguments: of the command line; None takes those that the program was called with.
        threads: of PyTorch's operators.
    """
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    for field in fields(settings):
        _add_option(parser, field.name, getattr(settings, field.name))
    settings = replace(settings, **vars(parser.parse_args(arguments)))
    path = runs_dir() / f"{name}.json"
    content = provenance() | {"settings": asdict(settings), "complete": False}
    torch.set_num_threads(threads)
    for found in measured(settings):
        content |= found
        save(path, content)
        print(table(name, content), flush=True)
    save(path, content | {"complete": True})
    print(path)
    return path


def cut_short(name: str, settings: Any) -> Content | None:
    """What a run with the same settings has left on this machine before it was cut, or None."""
    path = runs_dir() / f"{name}.json"
    if not path.exists():
        return None
    content = json.loads(path.read_text())
    here = provenance() | {"settings": asdict(settings), "complete": False}
    here = json.loads(json.dumps(here))
    del here["date"], here["commit"]
    return content if here.items() <= content.items() else None


def _add_option(parser: argparse.ArgumentParser, name: str, default: Any) -> None:
    kind = type(default)
    many = {}
    if isinstance(default, tuple):
        kind = type(default[0])
        many = {"nargs": "+"}
    told = {"type": kind, "default": default, "help": f"by default {default}"}
    parser.add_argument(f"--{name.replace('_', '-')}", **told, **many)


def save(path: Path, content: Content) -> None:
    """Write a file of JSON whole or not at all."""
    write_whole(path, json.dumps(content, indent=1) + "\n")


def table(name: str, content: Content) -> str:
    """What the texts will show of it, as far as it goes."""
    from benchmarks.render import block  # here: it takes long to import

    with tempfile.TemporaryDirectory() as folder:
        keep(name, content, facts=content, folder=Path(folder))
        # A look at the numbers ends no measurement: a table may want what is not there yet.
        with contextlib.suppress(Exception):
            return block(BLOCKS.get(name, name), folder=Path(folder))
    return ""


# --- programs in turns ----------------------------------------------------------------------------


def in_turns(
    programs: dict[Any, Callable[[Any], Any]], given: torch.Tensor, *, turns: int
) -> dict[Any, list[float]]:
    """By the name of the program: milliseconds of one call in each turn.

    The machine may be slower in one turn than in another. Every turn times every program, so a
    ratio of two of them compares what was measured side by side.
    """
    calls = {name: Calls(partial(program, given), 1) for name, program in programs.items()}
    found: dict[Any, list[float]] = {name: [] for name in programs}
    for _ in range(turns):
        for name, call in calls.items():
            found[name].append(1e3 * call()["seconds"])
    return found


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
        start = now()
        train_step(model, optimizer, batch)
        seconds.append(now() - start)
        schedule.step()
    return {"seconds": sum(seconds), "seconds_per_step": statistics.median(seconds)}


def in_16_bits() -> torch.autocast:
    """A context for products in bf16, where the machine has units for it."""
    return torch.autocast(machine().device, torch.bfloat16, enabled=machine().native_bf16)


def train_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    batch: dict[str, torch.Tensor],
    precision: Callable[[], contextlib.AbstractContextManager] = in_16_bits,
) -> float:
    """One step, and its loss."""
    with precision():
        loss = model(**batch, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
