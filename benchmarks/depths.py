"""Deep and thin on this machine: small models of equal weights and several depths, three seeds.

python -m benchmarks.depths                 some ten minutes of one core
python -m benchmarks.depths --short         fewer steps

It writes runs/depths.json. `python -m benchmarks.record` keeps a file in full size.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import study
from recipes_lib.architecture.deep_thin import Proportions, choose_proportions, deep_thin_model
from recipes_lib.core.measure.machine import machine
from recipes_lib.workflows.bench.kernels import now
from recipes_lib.workflows.bench.small_models import (
    BYTES,
    HELD_OUT_ROWS,
    bytes_of,
    held_out_loss,
    rows_of,
    train_side_by_side,
)

LAYERS = (2, 4, 8, 16, 32)
SEEDS = (0, 1, 2)
HEAD_DIM = 16  # small heads, so that a small model can have several
SIZES = {"weights": 420_000, "rows": 8, "seq_len": 64}


# --- the comparison -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Depth:
    """What became of one depth; `losses` are held-out, in nats per byte, one per seed.

    `seconds_per_token` is one token in eager mode on one thread, without a cache.
    """

    layers: int
    hidden: int
    parameters: int
    seconds_per_token: float
    losses: list[float]
    beyond_first: list[float]  # each loss, less that of the first depth with the same seed

    @property
    def loss(self) -> float:
        """The mean over the seeds."""
        return statistics.fmean(self.losses)

    def __str__(self) -> str:
        difference = statistics.fmean(self.beyond_first)
        return (
            f"{self.layers:2} blocks, {self.hidden:3} wide  {self.parameters:9,} weights  "
            f"loss {self.loss:.3f} ({difference:+.3f}, {min(self.beyond_first):+.3f} to "
            f"{max(self.beyond_first):+.3f})  {1e3 * self.seconds_per_token:5.2f} ms per token"
        )


def compare_depths(
    *,
    layers: Sequence[int] = (2, 4, 8, 16),
    weights: int = 420_000,
    steps: int = 150,
    seeds: Sequence[int] = (0, 1, 2),
    rows: int = 8,
    seq_len: int = 64,
    learning_rate: float = 2e-3,
) -> dict[int, Depth]:
    """Train a model of each depth on the same tokens with each seed.

    Args:
        layers: the depths; the others are compared with the first.
        weights: of each model, to 2 %.
        steps: of `rows` x `seq_len` tokens each.
    """
    shapes = {}
    for depth in layers:
        shapes[depth] = choose_proportions(
            weights=weights, layers=depth, vocabulary=BYTES, head_dim=HEAD_DIM
        )
    text = bytes_of("train")
    held_out = rows_of(bytes_of("validation"), HELD_OUT_ROWS, seq_len, seed=0)
    losses: dict[int, list[float]] = {depth: [] for depth in layers}
    models: dict[str, Any] = {}
    for seed in seeds:
        models = {str(depth): _build(depth, weights, seq_len, seed) for depth in layers}
        batches = (rows_of(text, rows, seq_len, seed=1000 * seed + step) for step in range(steps))
        train_side_by_side(models, batches, steps, learning_rate)
        for depth in layers:
            losses[depth].append(held_out_loss(models[str(depth)], held_out))
    times = _seconds_per_token(models)
    first = losses[layers[0]]
    return {
        depth: _depth(models[str(depth)], shapes[depth], times[str(depth)], losses[depth], first)
        for depth in layers
    }


def _depth(
    model: Any, shape: Proportions, seconds: float, losses: list[float], first: list[float]
) -> Depth:
    return Depth(
        layers=shape.num_hidden_layers,
        hidden=shape.hidden_size,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        seconds_per_token=seconds,
        losses=losses,
        beyond_first=[loss - other for loss, other in zip(losses, first)],
    )


def _build(layers: int, weights: int, seq_len: int, seed: int) -> Any:
    torch.manual_seed(seed)
    model = deep_thin_model(
        weights=weights,
        layers=layers,
        vocabulary=BYTES,
        head_dim=HEAD_DIM,
        max_position_embeddings=seq_len,
        bos_token_id=None,
        eos_token_id=None,
    )
    return model.to(machine().device).train()


@torch.no_grad()
def _seconds_per_token(models: dict[str, Any], rounds: int = 15) -> dict[str, float]:
    """The median of one token in eager mode, in turns."""
    token = torch.zeros(1, 1, dtype=torch.long, device=machine().device)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for model in models.values():
        model(input_ids=token, use_cache=False)
    for _ in range(rounds):
        for name, model in models.items():
            start = now()
            model(input_ids=token, use_cache=False)
            seconds[name].append(now() - start)
    return {name: statistics.median(each) for name, each in seconds.items()}


# --- the study ------------------------------------------------------------------------------------


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
