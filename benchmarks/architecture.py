"""Parts of the architecture on this machine: a small model trained both ways, and norms in GB/s.

python -m benchmarks.architecture                 some minutes of one core
python -m benchmarks.architecture --short         the form that a notebook runs
python -m benchmarks.architecture --parts norms   that part, and the others as they are in the file

It writes runs/architecture.json: the machine, and the parts `norms`, `healing`, `small_models`.
`python -m benchmarks.record` keeps the file once it has all of them in full size.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import parts_to_keep, write_whole
from recipes_lib.core.measure.machine import machine, provenance, runs_dir
from recipes_lib.workflows.bench.clock import now
from recipes_lib.workflows.bench.norms import compare_norms
from recipes_lib.workflows.bench.small_models import compare_architectures, pool_and_heal

FILE = "architecture.json"

FULL_STEPS = 600
HEALED_STEPS = 300  # before the heads are pooled, and a fifth of that after
SHORT_STEPS = 150
SEEDS = (0, 1, 2)

# The small models, and the tokens of a step: rows x seq_len.
SMALL = {"hidden": 64, "layers": 2, "rows": 8, "seq_len": 64}

# Rows and hidden size of x: that of a long prompt in a model like Llama-3.2-1B, and one token.
NORM_SIZES = {"prefill": (8192, 2048), "decode": (1, 2048)}

# --- the parts ------------------------------------------------------------------------------------


def small_models(*, short: bool) -> dict[str, Any]:
    """Every architecture, three seeds, equal tokens."""
    steps = FULL_STEPS
    if short:
        steps = SHORT_STEPS
    trained = compare_architectures(steps=steps, seeds=SEEDS, **SMALL)
    for name, result in trained.items():
        print(f"{name:<12}{result}", flush=True)
    rows = {name: asdict(result) for name, result in trained.items()}
    return {"steps": steps, "seeds": list(SEEDS), "sizes": SMALL, "rows": rows}


def healing(*, short: bool) -> dict[str, Any]:
    """A trained model with pooled heads, three seeds."""
    steps = HEALED_STEPS
    if short:
        steps = SHORT_STEPS
    after = steps // 5
    rows = []
    for kv_heads in (2, 1):
        found = pool_and_heal(
            kv_heads=kv_heads, steps=steps, healing_steps=after, seeds=SEEDS, **SMALL
        )
        for seed, losses in zip(SEEDS, found):
            print(f"4 -> {kv_heads} heads: {losses}", flush=True)
            rows.append({"kv_heads": kv_heads, "seed": seed} | losses._asdict())
    sizes = {"seeds": list(SEEDS), "sizes": SMALL}
    return {"steps": steps, "healing_steps": after, **sizes, "rows": rows}


def norms(*, short: bool) -> dict[str, Any]:
    """Every way to compute a norm, in fp32 and in the 16 bits of this machine, beside a copy."""
    dtypes = [torch.float32]
    if machine().compute_dtype != torch.float32:
        dtypes.append(machine().compute_dtype)
    rounds = 20
    if short:
        rounds = 5
    found = []
    for where, (rows, hidden) in NORM_SIZES.items():
        for dtype in dtypes:
            print(f"{where}, {rows} x {hidden}, {dtype}", flush=True)
            sizes = {"where": where, "rows": rows, "hidden": hidden, "dtype": str(dtype)}
            costs = compare_norms(rows=rows, hidden=hidden, dtype=dtype, rounds=rounds)
            for name, cost in costs.items():
                print(f"  {name:<10}{cost}", flush=True)
                found.append(sizes | {"way": name} | cost._asdict())
            copy = copy_cost(rows=rows, hidden=hidden, dtype=dtype, rounds=rounds)
            print(f"  copy      {copy['bytes_per_second'] / 1e9:.1f} GB/s", flush=True)
            found.append(sizes | {"way": "copy"} | copy)
    return {"rounds": rounds, "rows": found}


@torch.no_grad()
def copy_cost(*, rows: int, hidden: int, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """The fastest copy of x [N, D]: like a fused norm it reads x once and writes y once."""
    x = torch.randn(rows, hidden, device=machine().device).to(dtype)
    seconds = []
    for _ in range(rounds):
        start = now()
        x.clone()
        seconds.append(now() - start)
    moved = 2 * rows * hidden * dtype.itemsize
    return {"seconds": min(seconds), "bytes_per_second": moved / min(seconds), "error": 0.0}


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "norms": norms,
    "healing": healing,
    "small_models": small_models,
}

# --- the command ----------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> Path:
    """Run the parts, write the file after each, and return where it is.

    Raises ValueError if only some parts run and the others in the file are of another machine or
    day.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="fewer steps and rounds")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch; by default one")
    options = parser.parse_args(arguments)
    path = runs_dir() / FILE
    facts = provenance() | {"threads": options.threads}
    kept = [part for part in PARTS if part not in options.parts]
    content = facts | parts_to_keep(path, facts, kept)
    torch.set_num_threads(options.threads)
    for part in options.parts:
        content[part] = {"short": options.short} | PARTS[part](short=options.short)
        write_whole(path, content)
    return path


if __name__ == "__main__":
    print(main())
