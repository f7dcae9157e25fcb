"""Parts of the architecture on this machine: a small model trained both ways, and norms in GB/s.

python -m benchmarks.architecture      some minutes of one core
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks import study
from recipes_lib.core.measure.machine import machine
from recipes_lib.workflows.bench.kernels import compare_norms, now
from recipes_lib.workflows.bench.small_models import SIZES, compare_architectures, pool_and_heal

SEEDS = (0, 1, 2)

# Rows and hidden size of x: that of a long prompt in a model like Llama-3.2-1B, and one token.
NORM_SIZES = {"prefill": (8192, 2048), "decode": (1, 2048)}


@dataclass(frozen=True)
class Settings:
    """How long is trained, and how often measured."""

    steps: int = 600
    healed_steps: int = 300  # before the heads are pooled, and a fifth of that after
    rounds: int = 20  # of a norm


# --- the parts ------------------------------------------------------------------------------------


def small_models(settings: Settings) -> dict[str, Any]:
    """Every architecture, three seeds, equal tokens."""
    steps = settings.steps
    trained = compare_architectures(steps=steps, seeds=SEEDS)
    rows = {name: asdict(result) for name, result in trained.items()}
    return {"steps": steps, "seeds": list(SEEDS), "sizes": SIZES, "rows": rows}


def healing(settings: Settings) -> dict[str, Any]:
    """A trained model with pooled heads, three seeds."""
    steps = settings.healed_steps
    after = steps // 5
    found = pool_and_heal(steps=steps, healing_steps=after, seeds=SEEDS)
    rows = []
    for seed, losses in zip(SEEDS, found):
        rows.append({"kv_heads": 1, "seed": seed} | losses._asdict())
    sizes = {"seeds": list(SEEDS), "sizes": SIZES}
    return {"steps": steps, "healing_steps": after, **sizes, "rows": rows}


def norms(settings: Settings) -> dict[str, Any]:
    """Every way to compute a norm in fp32, beside a copy."""
    rounds = settings.rounds
    found = []
    for where, (rows, hidden) in NORM_SIZES.items():
        sizes = {"where": where, "rows": rows, "hidden": hidden, "dtype": str(torch.float32)}
        costs = compare_norms(rows=rows, hidden=hidden, rounds=rounds)
        found += [sizes | {"way": name} | cost._asdict() for name, cost in costs.items()]
        copy = copy_cost(rows=rows, hidden=hidden, rounds=rounds)
        found.append(sizes | {"way": "copy"} | copy)
    return {"rounds": rounds, "rows": found}


@torch.no_grad()
def copy_cost(*, rows: int, hidden: int, rounds: int) -> dict[str, float]:
    """The fastest copy of x [N, D]: like a fused norm it reads x once and writes y once."""
    x = torch.randn(rows, hidden, device=machine().device)
    seconds = []
    for _ in range(rounds):
        start = now()
        x.clone()
        seconds.append(now() - start)
    moved = 2 * rows * hidden * x.dtype.itemsize
    return {"seconds": min(seconds), "bytes_per_second": moved / min(seconds), "error": 0.0}


# --- the command ----------------------------------------------------------------------------------


def measured(settings: Settings) -> Iterator[dict[str, Any]]:
    """The parts, one after the other."""
    for part in (norms, healing, small_models):
        yield {part.__name__: part(settings)}


if __name__ == "__main__":
    study.run("architecture", Settings(), measured, about=__doc__)
