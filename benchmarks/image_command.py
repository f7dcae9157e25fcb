"""The command line that the programs with images share: parts, short sizes, one file.

python -m benchmarks.int8_images --parts times
python -m benchmarks.image_students --short
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import parts_to_keep, write_whole
from recipes_lib.core.measure.machine import provenance, runs_dir

# (parts, settings, folder of files) -> the name of each part, and what it found up to now
Measured = Callable[[list[str], Any, Path], Iterator[tuple[str, Any]]]


def run_parts(
    arguments: Sequence[str] | None,
    *,
    about: str,
    parts: Sequence[str],
    full: Any,
    short: Any,
    name: str,
    facts: dict[str, Any],
    measured: Measured,
) -> Path:
    """Measure the parts on one thread, write `runs/<name>.json` after each step, say where it is.

    Args:
        arguments: of the command line; None takes those that the program was called with.
        about: what the program does, for `--help`.
        full: the settings, a dataclass.
        short: those of `--short`.
        facts: what the file says besides about the run.
    Raises ValueError if only some parts run and the others in the file are of another machine or
    day.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--short", action="store_true", help="fewer images and turns")
    options = parser.parse_args(arguments)
    settings = full
    if options.short:
        settings = short
    torch.set_num_threads(1)
    path = runs_dir() / f"{name}.json"
    facts = provenance() | {"short": options.short, "settings": asdict(settings)} | facts
    kept = [part for part in parts if part not in options.parts]
    content = facts | parts_to_keep(path, facts, kept)
    for part, found in measured(options.parts, settings, runs_dir() / name):
        content[part] = found
        write_whole(path, content)
    return path
