"""Parts of the architecture on this machine: a small model trained both ways, and norms in GB/s.

python -m benchmarks.architecture                 some minutes of one core
python -m benchmarks.architecture --short         the form that a notebook runs

python -m benchmarks.architecture --parts norms   that part, and the others as they are in the file

It writes runs/architecture.json: the machine, and the parts `norms`, `healing`, `small_models`.
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
from recipes_lib.workflows.bench.small_models import compare_architectures, pool_and_heal

FULL_STEPS = 600
HEALED_STEPS = 300  # before the heads are pooled, and a fifth of that after
SHORT_STEPS = 150

# Rows and hidden size of x: that of a long prompt in a model like Llama-3.2-1B, and one token.
NORM_SIZES = {"prefill": (8192, 2048), "decode": (1, 2048)}


def small_models(*, short: bool) -> dict[str, Any]:
    """Every architecture, three seeds, equal tokens."""
    steps = SHORT_STEPS if short else FULL_STEPS
    trained = compare_architectures(steps=steps)
    for name, result in trained.items():
        print(f"{name:<12}{result}", flush=True)
    return {"steps": steps, "rows": {name: asdict(result) for name, result in trained.items()}}


def healing(*, short: bool) -> dict[str, Any]:
    """A trained model with pooled heads, three seeds."""
    steps = SHORT_STEPS if short else HEALED_STEPS
    rows = []
    for kv_heads in (2, 1):
        for losses in pool_and_heal(kv_heads=kv_heads, steps=steps, healing_steps=steps // 5):
            print(f"4 -> {kv_heads} heads: {losses}", flush=True)
            rows.append({"kv_heads": kv_heads} | losses._asdict())
    return {"steps": steps, "healing_steps": steps // 5, "rows": rows}


def norms(*, short: bool) -> list[dict[str, Any]]:
    """Every way to compute a norm, in fp32 and in the 16 bits of this machine."""
    dtypes = [torch.float32]
    if machine().compute_dtype != torch.float32:
        dtypes.append(machine().compute_dtype)
    found = []
    for where, (rows, hidden) in NORM_SIZES.items():
        for dtype in dtypes:
            print(f"{where}, {rows} x {hidden}, {dtype}", flush=True)
            rounds = 5 if short else 20
            costs = compare_norms(rows=rows, hidden=hidden, dtype=dtype, rounds=rounds)
            for name, cost in costs.items():
                print(f"  {name:<10}{cost}", flush=True)
                sizes = {"where": where, "rows": rows, "hidden": hidden, "dtype": str(dtype)}
                found.append(sizes | {"way": name} | cost._asdict())
    return found


PARTS = {"norms": norms, "healing": healing, "small_models": small_models}


def main(arguments: list[str] | None = None) -> Path:
    """Run the parts, write the file and return where it is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="fewer steps and rounds")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch; by default one")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    path = runs_dir() / "architecture.json"
    content = {}
    if path.exists():
        content = json.loads(path.read_text())
    content |= provenance() | {"threads": options.threads}
    for part in options.parts:
        content[part] = PARTS[part](short=options.short)
        path.write_text(json.dumps(content, indent=1) + "\n")
    return path


if __name__ == "__main__":
    print(main())
