"""Muon beside AdamW: every weight of SmolLM2 fine-tuned on the same rows, several seeds.

python -m benchmarks.muon

Each optimizer gets the same learning rates, as `muon_adamw` scales its steps like those of AdamW.
All runs begin with the pretrained weights; a seed decides which rows come, and in which order. The
rate warms up in a tenth of the steps and falls to zero. Losses are of the same held-out rows, in
nats per target.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import study
from recipes_lib.core.data import collate, load_instructions
from recipes_lib.core.data.row_order import rows_of_step
from recipes_lib.core.data.tokens_and_labels import Row
from recipes_lib.core.measure.machine import seed_everything
from recipes_lib.core.model import load_model, load_tokenizer
from recipes_lib.core.model.default_model import model_source
from recipes_lib.fine_tuning.completion_only_loss import completion_only_loss
from recipes_lib.fine_tuning.honest_evaluation import held_out_losses
from recipes_lib.training.gradient_accumulation import accumulate_gradients
from recipes_lib.training.muon import muon_adamw

OPTIMIZERS = ("AdamW", "Muon")
DECAY = 0.01  # of the weights, in both


@dataclass(frozen=True)
class Settings:
    """What is compared, and how much of it."""

    seeds: int = 3
    steps: int = 10
    rows: int = 4  # of a step
    tokens: int = 128  # of a row at most
    held_out: int = 48  # rows
    rates: tuple[float, ...] = (2e-4, 6e-4)


def compare(settings: Settings) -> Iterator[dict[str, Any]]:
    """The study after each run."""
    tokenizer = load_tokenizer()
    rows = list(load_instructions(tokenizer, max_tokens=settings.tokens, limit=1000))
    held_out = list(
        load_instructions(
            tokenizer, split="validation", max_tokens=settings.tokens, limit=settings.held_out
        )
    )
    pad = tokenizer.pad_token_id
    before = held_out_losses(load_model(), held_out, pad_token_id=pad).mean
    content: dict[str, Any] = {"source": model_source(), "before": before, "runs": []}
    for seed, rate, name in itertools.product(range(settings.seeds), settings.rates, OPTIMIZERS):
        chosen = {"rate": rate, "seed": seed, "settings": settings}
        loss = train(name, rows, held_out, pad_token_id=pad, **chosen)
        run = {"optimizer": name, "lr": rate, "seed": seed, "loss": loss}
        content["runs"].append(run)
        yield content


def train(
    name: str,
    rows: Sequence[Row],
    held_out: Sequence[Row],
    *,
    rate: float,
    seed: int,
    settings: Settings,
    pad_token_id: int,
) -> float:
    """One run: the held-out loss at its end."""
    seed_everything(seed)
    model = load_model().train()
    if name == "Muon":
        optimizer = muon_adamw(model, lr=rate, weight_decay=DECAY, betas=(0.9, 0.999))
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=DECAY, fused=True)
    warmup = max(1, settings.steps // 10)

    def share(step: int) -> float:
        """Of the learning rate: it rises, and falls to zero."""
        return min((step + 1) / warmup, (settings.steps - step) / (settings.steps - warmup + 1))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    for step in range(settings.steps):
        chosen = rows_of_step(step, rows=len(rows), rows_per_step=settings.rows, seed=seed)
        batch = collate(
            [rows[number] for number in chosen],
            pad_token_id=pad_token_id,
            device=str(model.device),
        )
        accumulate_gradients(model, [batch], loss_sum=completion_only_loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return held_out_losses(model, held_out, pad_token_id=pad_token_id).mean


if __name__ == "__main__":
    study.run("muon", Settings(), compare, about=__doc__)
