"""What a notebook about ranks shows, beside the training: small experiments that run on every rank.

    pool.run(who_is_there)                          a sum over the ranks
    pool.run(lanes_of_a_step, …)                    what computes and what sends, under DDP
    pool.run(grid_of_a_pipeline, …)                 who computes which micro-batch when
    pool.run(losses_across_a_checkpoint, …)         saved by some ranks, continued by others

Each returns plain numbers or small dataclasses, which a process can send back.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import distributed

from recipes_lib.core.ranks import group_device, rank, world_size
from recipes_lib.core.ranks.pipeline_grid import Action
from recipes_lib.core.ranks.rank_step import rank_step
from recipes_lib.parallel.checkpoint import (
    load_checkpoint,
    save_checkpoint,
    save_checkpoint_async,
)
from recipes_lib.parallel.data_parallel import apply_data_parallel, data_parallel_step
from recipes_lib.parallel.data_parallel.lanes import LaneRecorder, Lanes
from recipes_lib.parallel.fully_sharded import apply_fully_sharded
from recipes_lib.parallel.fully_sharded.precision import dtypes_of_step
from recipes_lib.parallel.fully_sharded.strategies import STRATEGIES as SHARDING
from recipes_lib.parallel.fully_sharded.strategies import StrategyBytes, measured_strategy
from recipes_lib.parallel.pipeline_parallel import apply_pipeline_parallel
from recipes_lib.workflows.on_ranks.batches import byte_batches
from recipes_lib.workflows.on_ranks.strategies import Options, adamw, own_rows
from recipes_lib.workflows.on_ranks.train import small_llama

RECORDED_STEPS = 5  # of a step whose lanes are drawn


def who_is_there() -> list[tuple[int, int, float]]:
    """For each rank: its number, the number of its process, and the sum that all ranks got."""
    number = torch.tensor(float(rank() + 1), device=group_device())
    distributed.all_reduce(number)  # 1 + 2 + … on every rank
    mine = (rank(), os.getpid(), number.item())
    everyone: list[Any] = [None] * world_size()
    distributed.all_gather_object(everyone, mine)
    return everyone


def lanes_of_a_step(
    *, sizes: dict[str, int], rows: int, tokens: int, bucket_megabytes: float
) -> Lanes:
    """Of five steps under DDP, recorded on rank 0 after two that warm up, the one of median length.

    A single step says little of the time: any of them may have been interrupted.
    """
    model = small_llama(sizes=sizes, tokens=tokens).to(group_device())
    wrapped = apply_data_parallel(model, bucket_megabytes=bucket_megabytes)
    optimizer = adamw(wrapped.parameters(), Options())
    recorder = LaneRecorder(wrapped)
    (batch,) = byte_batches(steps=1, rows=rows, tokens=tokens)
    own = {name: tensor.to(group_device()) for name, tensor in own_rows(batch).items()}

    def step() -> float:
        return data_parallel_step(wrapped, optimizer, [own])

    step()
    step()
    recorded = []
    for _ in range(RECORDED_STEPS):
        distributed.barrier()
        recorded.append(recorder.record(step))
    return sorted(recorded, key=_length)[RECORDED_STEPS // 2]


def _length(lanes: Lanes) -> float:
    """Seconds from the begin of the step to the end of its last part."""
    return max(part.end for part in (*lanes.compute, *lanes.communication))


def grid_of_a_pipeline(
    *, schedule: str, sizes: dict[str, int], rows: int, tokens: int, micro_batches: int
) -> list[Action]:
    """What every rank of a pipeline did when, in one step after one that warms up."""
    model = small_llama(sizes=sizes, tokens=tokens).to(group_device())
    stages = apply_pipeline_parallel(model, schedule=schedule, micro_batches=micro_batches)
    (batch,) = byte_batches(steps=1, rows=rows, tokens=tokens)
    batch = {name: tensor.to(group_device()) for name, tensor in batch.items()}
    stages.step(batch["input_ids"], batch["labels"])
    stages.step(batch["input_ids"], batch["labels"], record=True)
    return stages.recorded()


def dtypes_in_sixteen_bits(*, sizes: dict[str, int], rows: int, tokens: int) -> dict[str, str]:
    """Under FSDP2 with bf16 parameters: the dtype of everything that a step is made of."""
    model = small_llama(sizes=sizes, tokens=tokens).to(group_device())
    apply_fully_sharded(model, parameter_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    optimizer = adamw(model.parameters(), Options())
    (batch,) = byte_batches(steps=1, rows=rows, tokens=tokens)
    own = {name: tensor.to(group_device()) for name, tensor in own_rows(batch).items()}
    dtypes = dtypes_of_step(model, optimizer, own)
    return {what: str(dtype).removeprefix("torch.") for what, dtype in dtypes.items()}


def strategies_in_bytes(
    *, sizes: dict[str, int], rows: int, tokens: int
) -> dict[str, StrategyBytes]:
    """What a rank keeps and sends under each of FSDP's sharding strategies."""
    (batch,) = byte_batches(steps=1, rows=rows, tokens=tokens)
    own = {name: tensor.to(group_device()) for name, tensor in own_rows(batch).items()}
    found = {}
    for strategy in SHARDING:
        model = small_llama(sizes=sizes, tokens=tokens).to(group_device())
        found[strategy] = measured_strategy(model, strategy, own)
    return found


def losses_across_a_checkpoint(
    *, folder: str, sizes: dict[str, int], rows: int, tokens: int, steps: int, first: int
) -> list[float]:
    """Train from step `first` on for `steps` steps, and save at the end.

    From step 0 on it begins anew; from any other it continues what `folder` holds, whoever saved
    it.
    """
    model = small_llama(sizes=sizes, tokens=tokens).to(group_device())
    apply_fully_sharded(model)
    optimizer = adamw(model.parameters(), Options())
    run = {"sizes": sorted(sizes.items()), "rows": rows, "tokens": tokens}
    batches = byte_batches(steps=first + steps, rows=rows, tokens=tokens)
    if first > 0:
        first = load_checkpoint(folder, model=model, optimizer=optimizer, run=run)
    losses = []
    for batch in batches[first:]:
        own = {name: tensor.to(group_device()) for name, tensor in own_rows(batch).items()}
        losses.append(rank_step(model, optimizer, [own], max_norm=1.0))
    save_checkpoint(folder, step=first + len(losses), model=model, optimizer=optimizer, run=run)
    return losses


def stalls_of_a_save(*, folder: str, sizes: dict[str, int], tokens: int) -> dict[str, float]:
    """Seconds for which a save stops the training: in the foreground, and in the background."""
    model = small_llama(sizes=sizes, tokens=tokens).to(group_device())
    apply_fully_sharded(model)
    optimizer = adamw(model.parameters(), Options())
    (batch,) = byte_batches(steps=1, rows=world_size(), tokens=tokens)
    own = {name: tensor.to(group_device()) for name, tensor in own_rows(batch).items()}
    rank_step(model, optimizer, [own])
    what = {"model": model, "optimizer": optimizer, "run": {"kind": "stalls"}}
    save_checkpoint(folder, step=1, **what)  # the first one imports what it needs
    begin = time.perf_counter()
    save_checkpoint(folder, step=2, **what)
    foreground = time.perf_counter() - begin
    begin = time.perf_counter()
    pending = save_checkpoint_async(folder, step=3, **what)
    background = time.perf_counter() - begin
    pending.wait()
    return {"foreground": foreground, "background": background}
