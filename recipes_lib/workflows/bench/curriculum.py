"""Compare schedules of the row length at equal compute: does a curriculum reach a lower loss?

At equal *tokens* a curriculum is cheaper, and learns less from long rows. The fair question is what
it reaches when it spends what it saves on more steps:

    fixed      1 x 256   1 x 256   1 x 256                         3 steps
    growing    8 x 32    8 x 32    1 x 256   1 x 256               4 steps, as many operations

Each schedule starts from the same weights. Several seeds, because one run says little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from recipes_lib.training.curriculum import (
    Stages,
    curriculum_batches,
    flops_per_token,
    predicted_share_of_compute,
)


def compare_at_equal_compute(
    build: Callable[[], Any],
    tokens: torch.Tensor,
    held_out: torch.Tensor,
    *,
    schedules: dict[str, Stages],
    steps: int,
    learning_rate: float,
    seeds: Sequence[int] = (0, 1, 2),
) -> dict[str, list[float]]:
    """Held-out loss on long rows of each schedule, one per seed.

    Every run begins with equal weights and has the same compute.

    Args:
        build: makes a new model from torch's random state.
        tokens: the stream that is trained on.
        held_out: the long rows [B, S]; S is the full length.
        steps: of one row each, at the full length; a schedule of cheaper steps takes more of them.
    """
    full_length = held_out.shape[1]
    reached: dict[str, list[float]] = {name: [] for name in schedules}
    for seed in seeds:
        for name, stages in schedules.items():
            torch.manual_seed(seed)  # the same weights for every schedule
            model = build()
            train_curriculum(
                model,
                tokens,
                stages=stages,
                tokens_per_step=full_length,
                steps=steps_at_equal_compute(model, stages, steps, full_length=full_length),
                learning_rate=learning_rate,
                seed=seed,
            )
            # On long rows, which a curriculum has seen less of.
            with torch.no_grad():
                loss = model(input_ids=held_out, labels=held_out, use_cache=False).loss
            reached[name].append(loss.item())
    return reached


def steps_at_equal_compute(model: Any, stages: Stages, steps: int, *, full_length: int) -> int:
    """How many steps of the schedule cost what `steps` at the full length cost.

    Every step has the same number of tokens.
    """
    full = flops_per_token(model, seq_len=full_length)
    longest, _ = stages[-1]
    # The share refers to the schedule's own longest rows, which may be shorter than the full ones.
    at_longest = flops_per_token(model, seq_len=longest)
    return round(steps * full / (at_longest * predicted_share_of_compute(model, stages=stages)))


def train_curriculum(
    model: Any,
    tokens: torch.Tensor,
    *,
    stages: Stages,
    tokens_per_step: int,
    steps: int,
    learning_rate: float,
    seed: int = 0,
) -> list[float]:
    """Train with AdamW on `curriculum_batches` and return the loss of every step.

    The rate warms up and then follows a cosine to a tenth. Small on purpose, to compare schedules:
    one stage of share 1 is training at a fixed length.
    """
    # Nothing is tuned to a schedule: the same optimizer, rate and clipping for all of them.
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1
    )
    warmup = max(1, steps // 20)  # the first twentieth

    def rate(step: int) -> float:
        # By steps is by tokens here: every step has the same number of them.
        rising = (step + 1) / warmup
        falling = 0.55 + 0.45 * math.cos(math.pi * step / steps)
        return min(rising, falling)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    batches = curriculum_batches(
        tokens,
        stages=stages,
        tokens_per_step=tokens_per_step,
        steps=steps,
        seed=seed,
        device=str(model.device),
    )
    losses = []
    for batch in batches:  # [B, S], S grows from stage to stage
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
