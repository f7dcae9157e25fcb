"""What training on a four-bit grid wins back: SmolLM2, after equal steps on equal text.

python -m benchmarks.quantization_aware

Every way trains the same model on the same rows in the same order, each at a learning rate that is
good for it. All end on the same grid: four bits in groups of 64, output layer and embedding in 8
bits, activations in 8 bits.

    full precision     trains as ever, and is rounded at the end
    aware              trains with the rounding
    aware + teacher    the same, and half of the loss is the distribution of the model in full
                       precision, as it was before training

The text is Python's own standard library. Training on it makes the model better at it, rounded or
not, so the first way is the control: of what its rounding costs, how much do the others save?

    share = (perplexity of the control, rounded - that of the way, rounded)
            / (perplexity of the control, rounded - that of the control, not rounded)

The weights that the package carries were stored in another four-bit grid before: groups of
32, with an offset. On that grid rounding would cost nothing and prove nothing; this one is coarser.

A seed decides which rows come, and in which order. Perplexity is that of held-out modules in fp32.
On a CPU seconds are those of this thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks import study
from benchmarks.distillation import held_out_loss
from recipes_lib.compression.distillation import Taught, apply_distillation
from recipes_lib.core.data.tokens_and_labels import Row
from recipes_lib.core.measure.machine import seed_everything
from recipes_lib.core.model import load_model, load_tokenizer
from recipes_lib.core.model.default_model import model_source
from recipes_lib.core.model.mixins import take_out
from recipes_lib.precision.quantization_aware import (
    apply_quantization_aware,
    apply_rounding,
    remove_quantization_aware,
)

CONTROL = "full precision"
WAYS = (CONTROL, "aware", "aware + teacher")


@dataclass(frozen=True)
class Settings:
    """What is trained, and for how long. `steps` are those of each run."""

    seeds: int = 3
    steps: int = 30
    weight_bits: int = 4
    group: int = 64
    rows: int = 4  # of a step
    seq: int = 256
    held_out: int = 8  # rows
    lr: float = 1e-4  # in full precision
    aware_lr: float = 3e-4  # with the rounding: a weight has to reach the middle of two levels
    teacher_share: float = 0.5

    @property
    def grid(self) -> dict[str, int]:
        """The options of the grid that all ways end on."""
        return {"weight_bits": self.weight_bits, "group": self.group}

    def rate(self, way: str) -> float:
        """The learning rate of a way."""
        if way == CONTROL:
            return self.lr
        return self.aware_lr


def compare(settings: Settings) -> Iterator[dict[str, Any]]:
    """What there is after each run."""
    text = partial(study.text_rows, load_tokenizer(), tokens=settings.seq)
    held_out = text("validation", count=settings.held_out)
    pool = text("train", count=2 * settings.steps * settings.rows)
    content = {
        "source": model_source(),
        "untrained": both_perplexities(load_model(), held_out, settings),
        "runs": [],
    }
    for seed in range(settings.seeds):
        for way in WAYS:
            content["runs"].append(train(way, pool, held_out, settings=settings, seed=seed))
            yield content


def train(
    way: str, pool: Sequence[Row], held_out: Sequence[Row], *, settings: Settings, seed: int
) -> dict[str, Any]:
    """One run: its perplexities, and the seconds of its steps."""
    seed_everything(seed)
    model = prepared(way, settings)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.rate(way), betas=(0.9, 0.99), weight_decay=0.0, fused=True
    )
    seconds = study.train(
        model, optimizer, pool, steps=settings.steps, rows=settings.rows, seed=seed
    )
    found = both_perplexities(_in_full_precision(model, way), held_out, settings)
    return {"way": way, "seed": seed, **found, **seconds}


def prepared(way: str, settings: Settings) -> Any:
    """A fresh model that trains in this way."""
    model = load_model().train()
    if way == CONTROL:
        return model
    if way == "aware":
        return apply_quantization_aware(model, **settings.grid)
    # The loss of distillation multiplies with the output layer's weight itself. Its 8 bits cost
    # next to nothing, and come at the end.
    apply_distillation(model, load_model(), teacher_share=settings.teacher_share)
    return apply_quantization_aware(model, **settings.grid, output_bits=None)


def _in_full_precision(model: Any, way: str) -> Any:
    """The trained model with plain layers: what an exporter would take."""
    if way == CONTROL:
        return model
    remove_quantization_aware(model)
    if way == "aware + teacher":
        take_out(model, Taught)
    return model


def both_perplexities(model: Any, held_out: Sequence[Row], settings: Settings) -> dict[str, float]:
    """Of a model as it is, and rounded; it is used up."""
    model.eval()
    full = math.exp(held_out_loss(model, held_out))
    apply_rounding(model, **settings.grid)
    return {"full": full, "rounded": math.exp(held_out_loss(model, held_out))}


if __name__ == "__main__":
    study.run("quantization_aware", Settings(), compare, about=__doc__)
