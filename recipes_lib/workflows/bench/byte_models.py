"""Small models side by side on the bytes of the standard library: text, steps, held-out loss.

A byte is a token, so no tokenizer plays a part. All models of a comparison read the same bytes in
the same order, in the same step: their times are taken in turns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from recipes_lib.core.data import load_text
from recipes_lib.core.measure.machine import machine
from recipes_lib.workflows.bench.clock import now

BYTES = 256  # the vocabulary
HELD_OUT_ROWS = 128
WARM_UP = 0.1  # the part of the steps in which the learning rate rises

# --- the text -------------------------------------------------------------------------------------

TEXT_BYTES = 4_000_000  # more than any run here reads


def bytes_of(split: str) -> Tensor:
    """The beginning of the standard library as bytes [N], each a token."""
    text = load_text(split=split).encode()[:TEXT_BYTES]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def rows_of(text: Tensor, rows: int, seq_len: int, *, seed: int) -> Tensor:
    """Rows [B, S] from places that the seed draws."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - seq_len, (rows, 1), generator=generator)
    places = starts + torch.arange(seq_len)  # [B, S]
    return text[places].long().to(machine().device)


# --- the training ---------------------------------------------------------------------------------


def train_side_by_side(
    models: dict[str, Any], batches: Iterator[Tensor], steps: int, learning_rate: float
) -> dict[str, list[float]]:
    """Train all models side by side on the same batches; the seconds of each of their steps."""
    optimizers = {}
    for name, model in models.items():
        optimizers[name] = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for step, ids in enumerate(batches):
        rate = learning_rate * _share_of_rate(step, steps)
        for name, model in models.items():
            start = now()
            _step(model, optimizers[name], ids, rate)
            seconds[name].append(now() - start)
    return seconds


def _step(model: Any, optimizer: torch.optim.Optimizer, ids: Tensor, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _share_of_rate(step: int, steps: int) -> float:
    """It rises in the first tenth of the steps, and falls along a cosine to zero."""
    rising = max(round(WARM_UP * steps), 1)
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / (steps - rising)))


@torch.no_grad()
def held_out_loss(model: Any, rows: Tensor) -> float:
    model.eval()
    return model(input_ids=rows, labels=rows, use_cache=False).loss.item()
