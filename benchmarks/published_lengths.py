"""The longest texts that others have trained on, recipe after recipe, beside the equation's.

python -m benchmarks.published_lengths     some seconds, no weights and no GPU

ArcticTraining, Llama 3.1 8B, all weights, on one H200: projects/sequence-parallelism at commit
2771b4b1. Each of its four files says the tokens, and what of the card was in use. Weights and
optimizer are on the host, so neither is counted here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks.record import keep
from recipes_lib.core.measure.machine import GIB
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.predict import equation
from recipes_lib.workflows.longest_sequence import predicted_longest

SHAPE = "llama-3.1-8b"
TILE = 4096  # tokens
# Tokens of a text, and what of the card was in use, taken as GiB.
PUBLISHED = {
    "SDPA + checkpoints": (65_000, 137.36),
    "+ chunked loss (Liger)": (300_000, 134.96),
    "+ offloaded inputs": (650_000, 126.81),
    "+ tiled MLP": (1_200_000, 136.15),
}


def predicted_tokens(model: Any, last: str, in_use: float) -> int:
    """The longest text by arithmetic within the same GiB, with all recipes up to `last`."""
    recipes = list(PUBLISHED)[: list(PUBLISHED).index(last) + 1]

    def peak(tokens: int) -> int:
        step = equation.on_flash_attention(equation.plain_step(model, rows=1, length=tokens))
        step = replace(step, weights=0, states=0, gradients=0)  # on the host
        if "+ chunked loss (Liger)" in recipes:
            step = equation.with_chunked_loss(step)
        if "+ tiled MLP" in recipes:
            step = equation.with_tiled_mlp(step, tile=TILE, norms=True)
        step = equation.with_checkpointing(step)
        if "+ offloaded inputs" in recipes:
            step = equation.with_inputs_elsewhere(step)
        return step.peak

    return predicted_longest(peak, limit_bytes=int(in_use * GIB))


def lengths() -> list[dict[str, Any]]:
    """A row for each published length."""
    model = model_of_shape(SHAPE, dtype=torch.bfloat16, device="meta")
    rows = []
    for name, (tokens, in_use) in PUBLISHED.items():
        expected = predicted_tokens(model, name, in_use)
        rows.append({"name": name, "published_tokens": tokens, "predicted_tokens": expected})
    return rows


if __name__ == "__main__":
    print(keep("published_lengths", {"rows": lengths()}))
