"""Parts of the architecture on this machine: a small model trained both ways, and norms in GB/s.

python -m benchmarks.architecture                 some minutes of one core
python -m benchmarks.architecture --short         the form that a notebook runs

It writes runs/architecture.json: the machine, and the parts `small_models` and `norms`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from recipes_lib.core.machine import machine, provenance, runs_dir
from recipes_lib.workflows.bench.norms import compare_norms
from recipes_lib.workflows.bench.small_models import compare_architectures

FULL_STEPS = 600
SHORT_STEPS = 150

# Rows and hidden size of x: that of a long prompt in a model like Llama-3.2-1B, and one token.
NORM_SIZES = {"prefill": (8192, 2048), "decode": (1, 2048)}


def small_models(*, steps: int) -> dict[str, Any]:
    """Every architecture, three seeds, equal tokens."""
    trained = compare_architectures(steps=steps)
    for name, result in trained.items():
        print(f"{name:<12}{result}", flush=True)
    return {"steps": steps, "rows": {name: asdict(result) for name, result in trained.items()}}


def norms() -> list[dict[str, Any]]:
    """Every way to compute a norm, in fp32 and in the 16 bits of this machine."""
    dtypes = [torch.float32]
    if machine().compute_dtype != torch.float32:
        dtypes.append(machine().compute_dtype)
    found = []
    for where, (rows, hidden) in NORM_SIZES.items():
        for dtype in dtypes:
            print(f"{where}, {rows} x {hidden}, {dtype}", flush=True)
            for name, cost in compare_norms(rows=rows, hidden=hidden, dtype=dtype).items():
                print(f"  {name:<10}{cost}", flush=True)
                sizes = {"where": where, "rows": rows, "hidden": hidden, "dtype": str(dtype)}
                found.append(sizes | {"way": name} | cost._asdict())
    return found


def main(arguments: list[str] | None = None) -> Path:
    """Run both parts, write the file and return where it is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="fewer steps of the small models")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch; by default one")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    steps = SHORT_STEPS if options.short else FULL_STEPS
    content = provenance() | {
        "threads": options.threads,
        "norms": norms(),
        "small_models": small_models(steps=steps),
    }
    path = runs_dir() / "architecture.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


if __name__ == "__main__":
    print(main())
