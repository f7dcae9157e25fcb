"""The peak of one rank of many: by arithmetic, and by a step without the other ranks.

peak = sharded_peak(shape="llama-3.1-8b", layers=4, ranks=64, tokens=1024)     FSDP2, no data
peak = stage_peak(sizes=SIZES, ranks=8, rank=7, rows=8, tokens=128)            a pipeline's stage
peak.predicted, peak.counted        bytes
"""

from __future__ import annotations

import gc
from typing import Any, NamedTuple

import torch

from recipes_lib.core.measure.live_bytes import LiveBytes
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.predict.budget import Shape
from recipes_lib.core.predict.dry_ranks import pretended_ranks, rank_peak
from recipes_lib.core.predict.plain_step import budget_of
from recipes_lib.core.ranks import group_device, world_size
from recipes_lib.core.ranks import rank as own_rank
from recipes_lib.core.ranks.rank_bytes import rank_bytes
from recipes_lib.parallel.fully_sharded import apply_fully_sharded, estimate_fully_sharded
from recipes_lib.parallel.pipeline_parallel import (
    apply_pipeline_parallel,
)
from recipes_lib.parallel.pipeline_parallel.arithmetic import estimate_pipeline_parallel
from recipes_lib.workflows.on_ranks.batches import byte_batches
from recipes_lib.workflows.on_ranks.train import small_llama


class PeakOfRank(NamedTuple):
    """Bytes of one rank at its worst moment, and what of them stays from step to step."""

    predicted: int
    counted: int
    kept: int


def sharded_peak(*, shape: str, layers: int | None, ranks: int, tokens: int) -> PeakOfRank:
    """One row of `tokens` per rank, in fp32 with AdamW; nothing is allocated.

    Args:
        shape: a key of `core.model.SHAPES`.
        layers: fewer blocks than the shape has; None for all.
        ranks: how many there would be.
    Raises ValueError for numbers below 1 and an unknown shape.
    """
    plain = model_of_shape(shape, layers=layers, device="meta")
    step_of_all = Shape(batch=ranks, seq=tokens, ranks=ranks)
    budget = budget_of(plain, step_of_all)
    predicted = estimate_fully_sharded(budget, plain, step_of_all)

    def build(mesh: Any) -> tuple[Any, torch.optim.Optimizer, Any]:
        model = model_of_shape(shape, layers=layers, device="cpu")
        apply_fully_sharded(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        ids = torch.zeros(1, tokens, dtype=torch.long)

        def step() -> None:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    counted = rank_peak(build, ranks=ranks).total
    kept = (budget.weights + budget.gradients + budget.states) // ranks
    return PeakOfRank(predicted.peak, counted, kept)


def stage_peak(
    *, sizes: dict[str, int], ranks: int, rank: int, rows: int, tokens: int, micro_batches: int
) -> PeakOfRank:
    """One stage of a 1F1B pipeline over so many ranks, of which only this process exists.

    PyTorch's schedule runs with its buffers and with all micro-batches that it keeps for backward.
    What arrives from the other ranks is memory as it was found, so there is no loss.

    Args:
        sizes: of the model, see `train.small_llama`.
        ranks: how many there would be.
        rank: which of them this process pretends to be.
        rows: of the whole batch of a step.
        micro_batches: into how many the batch is cut.
    Raises ValueError for numbers out of range or that do not divide, and in a process that is a
    rank already.
    """
    with pretended_ranks(ranks, rank=rank):
        return peak_of_own_stage(sizes=sizes, rows=rows, tokens=tokens, micro_batches=micro_batches)


def peak_of_own_stage(
    *, sizes: dict[str, int], rows: int, tokens: int, micro_batches: int
) -> PeakOfRank:
    """The stage of this rank, in a step after the first. Arguments and errors as `stage_peak`."""
    gc.collect()  # a model that nobody uses any more would be gone later, in the middle of a step
    with LiveBytes(group_device().type) as of_others:
        pass
    model = small_llama(sizes=sizes, tokens=tokens).to(group_device())
    shape = Shape(batch=rows, seq=tokens)
    numbers = {"micro_batches": micro_batches, "ranks": world_size(), "rank": own_rank()}
    budget = estimate_pipeline_parallel(budget_of(model, shape), model, shape, **numbers)
    pipeline = apply_pipeline_parallel(model, micro_batches=micro_batches)
    del model  # the other stages of it have no weights any more
    optimizer = torch.optim.AdamW(pipeline.parameters())
    (batch,) = byte_batches(steps=1, rows=rows, tokens=tokens)
    ids, labels = [batch[name].to(group_device()) for name in ("input_ids", "labels")]
    pipeline.step(ids, labels)
    optimizer.step()
    held = rank_bytes(pipeline.stages, optimizer)
    optimizer.zero_grad()
    with LiveBytes(group_device().type) as alive:
        pipeline.step(ids, labels)
    kept = held.parameters + held.gradients + held.states
    return PeakOfRank(budget.peak, alive.peak - of_others.current, kept)
