"""Deep and thin on this machine: small models of equal weights and several depths, three seeds.

python -m benchmarks.depths                 some ten minutes of one core
python -m benchmarks.depths --short         fewer steps

It writes runs/depths.json. `python -m benchmarks.record` keeps a file in full size.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.record import write_whole
from recipes_lib.core.measure.machine import provenance, runs_dir
from recipes_lib.workflows.bench.depths import compare_depths

FILE = "depths.json"
FULL_STEPS = 600
SHORT_STEPS = 60
SEEDS = (0, 1, 2)
LAYERS = (2, 4, 8, 16, 32)
SIZES = {"weights": 420_000, "rows": 8, "seq_len": 64}


def main(arguments: list[str] | None = None) -> Path:
    """Train all depths, write the file, and return where it is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="fewer steps")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch; by default one")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    steps = FULL_STEPS
    if options.short:
        steps = SHORT_STEPS
    trained = compare_depths(layers=LAYERS, steps=steps, seeds=SEEDS, **SIZES)
    for result in trained.values():
        print(result, flush=True)
    content = provenance() | {
        "threads": options.threads,
        "short": options.short,
        "steps": steps,
        "seeds": list(SEEDS),
        "sizes": SIZES,
        "rows": [asdict(result) for result in trained.values()],
    }
    path = runs_dir() / FILE
    write_whole(path, content)
    return path


if __name__ == "__main__":
    main()
