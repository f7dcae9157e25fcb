"""Deep and thin on this machine: small models of equal weights and several depths, three seeds.

python -m benchmarks.depths                 some ten minutes of one core
python -m benchmarks.depths --short         fewer steps

It writes runs/depths.json. `python -m benchmarks.record` keeps a file in full size.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import study
from recipes_lib.workflows.bench.depths import compare_depths

LAYERS = (2, 4, 8, 16, 32)
SEEDS = (0, 1, 2)
SIZES = {"weights": 420_000, "rows": 8, "seq_len": 64}


@dataclass(frozen=True)
class Settings:
    """How long each of them trains."""

    steps: int = 600


def compare(
    settings: Settings, options: argparse.Namespace, older: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """All depths at once."""
    trained = compare_depths(layers=LAYERS, steps=settings.steps, seeds=SEEDS, **SIZES)
    for result in trained.values():
        print(result, flush=True)
    yield {
        "steps": settings.steps,
        "seeds": list(SEEDS),
        "sizes": SIZES,
        "rows": [asdict(result) for result in trained.values()],
    }


def main(arguments: Sequence[str] | None = None) -> Path:
    """Train all depths, write the file, and return where it is."""
    short = Settings(steps=60)
    return study.run("depths", Settings(), compare, about=__doc__, arguments=arguments, short=short)


if __name__ == "__main__":
    main()
