"""Deep and thin on this machine: small models of equal weights and several depths, three seeds.

python -m benchmarks.depths      some ten minutes of one core
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks import study
from recipes_lib.architecture.deep_thin import deep_thin_model
from recipes_lib.core.measure.machine import machine
from recipes_lib.workflows.bench.small_models import (
    BYTES,
    HELD_OUT_ROWS,
    bytes_of,
    loss_on_rows,
    rows_of_bytes,
    train_side_by_side,
)

HEAD_DIM = 16  # small heads, so that a small model can have several
RATE = 2e-3  # of learning
TURNS = 15  # of a token


@dataclass(frozen=True)
class Settings:
    """Models of so many weights, to 2 %, and how long each of them trains."""

    layers: tuple[int, ...] = (2, 4, 8, 16, 32)  # the others are compared with the first
    seeds: int = 3
    steps: int = 600  # of `rows` x `seq_len` tokens each
    weights: int = 420_000
    rows: int = 8
    seq_len: int = 64


def compare(settings: Settings) -> Iterator[dict[str, Any]]:
    """All depths at once. `losses` are held-out, in nats per byte, one per seed."""
    text = bytes_of("train")
    held_out = rows_of_bytes(bytes_of("validation"), HELD_OUT_ROWS, settings.seq_len, seed=0)
    losses: dict[int, list[float]] = {depth: [] for depth in settings.layers}
    for seed in range(settings.seeds):
        models = {depth: model_of(depth, seed, settings) for depth in settings.layers}
        numbers = range(1000 * seed, 1000 * seed + settings.steps)
        batches = (rows_of_bytes(text, settings.rows, settings.seq_len, seed=n) for n in numbers)
        train_side_by_side(models, batches, settings.steps, RATE)
        for depth, model in models.items():
            losses[depth].append(loss_on_rows(model, held_out))
    seconds = seconds_per_token(models)
    first = losses[settings.layers[0]]
    rows = []
    for depth, model in models.items():
        row = {"layers": depth, "hidden": model.config.hidden_size}
        row |= {"parameters": model.num_parameters(), "seconds_per_token": seconds[depth]}
        row |= {"losses": losses[depth]}
        # Of each seed its loss, less that of the first depth.
        row["beyond_first"] = [loss - other for loss, other in zip(losses[depth], first)]
        rows.append(row)
    sizes = {"weights": settings.weights, "rows": settings.rows, "seq_len": settings.seq_len}
    seeds = list(range(settings.seeds))
    yield {"steps": settings.steps, "seeds": seeds, "sizes": sizes, "rows": rows}


def model_of(layers: int, seed: int, settings: Settings) -> Any:
    """A model of so many blocks, as wide as the weights allow."""
    torch.manual_seed(seed)
    model = deep_thin_model(
        weights=settings.weights,
        layers=layers,
        vocabulary=BYTES,
        head_dim=HEAD_DIM,
        max_position_embeddings=settings.seq_len,
        bos_token_id=None,
        eos_token_id=None,
    )
    return model.to(machine().device).train()


@torch.no_grad()
def seconds_per_token(models: dict[int, Any]) -> dict[int, float]:
    """The fastest turn of one token in eager mode, without a cache."""
    token = torch.zeros(1, 1, dtype=torch.long, device=machine().device)
    programs = {depth: partial(model, use_cache=False) for depth, model in models.items()}
    found = study.in_turns(programs, token, turns=TURNS)
    return {depth: min(milliseconds) / 1e3 for depth, milliseconds in found.items()}


if __name__ == "__main__":
    study.run("depths", Settings(), compare, about=__doc__)
