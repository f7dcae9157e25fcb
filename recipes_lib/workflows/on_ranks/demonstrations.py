"""What notebook 02 shows beside the training: small experiments that run on every rank.

Each returns plain numbers or small dataclasses, which a process can send back. An idea by hand
returns the largest difference to the real thing.
"""

from __future__ import annotations

import copy
import os
import time
from typing import Any

import torch
from torch import distributed
from torch.nn import functional as F

from recipes_lib.core.ranks import group_device, rank, world_size
from recipes_lib.core.ranks.weighted_step import (
    Batch,
    averaging,
    rank_step,
    sum_of_losses,
    tokens_of_all_ranks,
)
from recipes_lib.parallel.bandwidth import ring_all_reduce
from recipes_lib.parallel.checkpoint import (
    load_checkpoint,
    save_checkpoint,
    save_checkpoint_async,
)
from recipes_lib.parallel.data_parallel import (
    apply_data_parallel,
    averaged_by_hand,
    data_parallel_step,
)
from recipes_lib.parallel.data_parallel.lanes import LaneRecorder, Lanes
from recipes_lib.parallel.fully_sharded import apply_fully_sharded, linear_of_shards
from recipes_lib.parallel.fully_sharded.observed import STRATEGIES as SHARDING
from recipes_lib.parallel.fully_sharded.observed import (
    StrategyBytes,
    dtypes_of_step,
    measured_strategy,
)
from recipes_lib.parallel.pipeline_parallel import apply_pipeline_parallel
from recipes_lib.parallel.pipeline_parallel.timed_actions import Action
from recipes_lib.parallel.zero import apply_zero, owners_of, step_of_own_part
from recipes_lib.workflows.on_ranks.strategies import Options, adamw, own_rows
from recipes_lib.workflows.on_ranks.train import byte_batches, small_llama

RECORDED_STEPS = 5  # of a step whose lanes are drawn
SMALL = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
TOKENS = 32


def who_is_there() -> list[tuple[int, int, float]]:
    """Shown of each rank: its number, that of its process, and the sum that all ranks got."""
    number = torch.tensor(float(rank() + 1), device=group_device())
    distributed.all_reduce(number)  # 1 + 2 + … on every rank
    mine = (rank(), os.getpid(), number.item())
    everyone: list[Any] = [None] * world_size()
    distributed.all_gather_object(everyone, mine)
    return everyone


# --- ideas by hand --------------------------------------------------------------------------------


def ring_by_hand() -> float:
    """Shown on ranks: a ring of sends against the all-reduce of the library."""
    ours = torch.randn(1024, device=group_device()) + rank()
    theirs = ours.clone()
    ring_all_reduce(ours)
    distributed.all_reduce(theirs)
    return (ours - theirs).abs().max().item()


def data_parallel_by_hand() -> float:
    """Shown on ranks: gradients averaged after backward, against those of DDP's buckets."""
    plain = _small_llama(SMALL, TOKENS)
    wrapped = apply_data_parallel(copy.deepcopy(plain))
    batch = _rows_of_this_rank(2 * world_size(), TOKENS)
    for model in (plain, wrapped):
        _backward_of_all(model, batch)
    averaged_by_hand(plain)
    return _largest_difference(plain, wrapped.module, of="grad")


def zero_by_hand() -> float:
    """Shown on ranks: each updates the parameters that it owns, against ZeRO-1."""
    plain = _small_llama(SMALL, TOKENS)
    trained, theirs = apply_zero(copy.deepcopy(plain), torch.optim.SGD, stage=1, lr=0.1)
    batch = _rows_of_this_rank(2 * world_size(), TOKENS)
    for model in (plain, trained):
        _backward_of_all(model, batch)
    parameters = list(plain.parameters())
    owners = owners_of([each.numel() for each in parameters], ranks=world_size())
    owned = [each for each, owner in zip(parameters, owners, strict=True) if owner == rank()]
    step_of_own_part(parameters, owners, torch.optim.SGD(owned, lr=0.1))
    theirs.step()
    return _largest_difference(plain, trained.module, of="data")


def sharded_layer_by_hand() -> float:
    """Shown on ranks: a layer whose weight is gathered when used, against the whole layer."""
    device = group_device()
    whole = torch.randn(12, 16, device=device)  # all ranks have the same seed
    x = torch.randn(world_size(), 6, 16, device=device)
    shard = whole.chunk(world_size())[rank()].clone().requires_grad_()
    y = linear_of_shards(x[rank()], shard)
    y.square().sum().backward()
    reference = whole.clone().requires_grad_()
    expected = F.linear(x, reference)
    (expected.square().sum() / world_size()).backward()
    in_output = (y - expected[rank()]).abs().max()
    in_gradient = (shard.grad - reference.grad.chunk(world_size())[rank()]).abs().max()
    return max(in_output, in_gradient).item()


def _small_llama(sizes: dict[str, int], tokens: int) -> Any:
    return small_llama(sizes=sizes, tokens=tokens).to(group_device())


def _rows_of_this_rank(rows: int, tokens: int) -> Batch:
    """For a demonstration: this rank's rows of one batch of all ranks."""
    (batch,) = byte_batches(steps=1, rows=rows, tokens=tokens)
    return own_rows(batch)


def _backward_of_all(model: Any, batch: Batch) -> None:
    """For a demonstration: gradients of the mean over the tokens of all ranks."""
    tokens = tokens_of_all_ranks([batch])
    with averaging(model, now=True):
        (sum_of_losses(model, batch) * world_size() / tokens).backward()


def _largest_difference(model: Any, other: Any, *, of: str) -> float:
    """For a demonstration: the largest difference of parameters ("data") or gradients ("grad")."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    differences = [(getattr(a, of) - getattr(b, of)).abs().max() for a, b in pairs]
    return max(differences).item()


# --- experiments ----------------------------------------------------------------------------------


def lanes_of_a_step(
    *, sizes: dict[str, int], rows: int, tokens: int, bucket_megabytes: float
) -> Lanes:
    """Shown on rank 0: of five steps under DDP after two to warm up, that of median length.

    A single step says little of the time: any of them may have been interrupted.
    """
    model = _small_llama(sizes, tokens)
    wrapped = apply_data_parallel(model, bucket_megabytes=bucket_megabytes)
    optimizer = adamw(wrapped.parameters(), Options())
    recorder = LaneRecorder(wrapped)
    own = _rows_of_this_rank(rows, tokens)

    def step() -> float:
        return data_parallel_step(wrapped, optimizer, [own])

    step()
    step()
    recorded = []
    for _ in range(RECORDED_STEPS):
        distributed.barrier()
        recorded.append(recorder.record(step))
    return sorted(recorded, key=_length_of_step)[RECORDED_STEPS // 2]


def _length_of_step(lanes: Lanes) -> float:
    """Seconds from the begin of the step to the end of its last part."""
    return max(part.end for part in (*lanes.compute, *lanes.communication))


def grid_of_a_pipeline(
    *, schedule: str, sizes: dict[str, int], rows: int, tokens: int, micro_batches: int
) -> list[Action]:
    """Shown on ranks: what each rank of a pipeline did when, in one step after a warm-up."""
    model = _small_llama(sizes, tokens)
    stages = apply_pipeline_parallel(model, schedule=schedule, micro_batches=micro_batches)
    (batch,) = byte_batches(steps=1, rows=rows, tokens=tokens)
    batch = {name: tensor.to(group_device()) for name, tensor in batch.items()}
    stages.step(batch["input_ids"], batch["labels"])
    stages.step(batch["input_ids"], batch["labels"], record=True)
    return stages.recorded()


def dtypes_in_sixteen_bits(*, sizes: dict[str, int], rows: int, tokens: int) -> dict[str, str]:
    """Shown on ranks under FSDP2 with bf16 parameters: the dtype of all that a step is made of."""
    model = _small_llama(sizes, tokens)
    apply_fully_sharded(model, parameter_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    optimizer = adamw(model.parameters(), Options())
    own = _rows_of_this_rank(rows, tokens)
    dtypes = dtypes_of_step(model, optimizer, own)
    return {what: str(dtype).removeprefix("torch.") for what, dtype in dtypes.items()}


def strategies_in_bytes(
    *, sizes: dict[str, int], rows: int, tokens: int
) -> dict[str, StrategyBytes]:
    """Shown on ranks: what one keeps and sends under each of FSDP's sharding strategies."""
    own = _rows_of_this_rank(rows, tokens)
    found = {}
    for strategy in SHARDING:
        model = _small_llama(sizes, tokens)
        found[strategy] = measured_strategy(model, strategy, own)
    return found


def losses_across_a_checkpoint(
    *, folder: str, sizes: dict[str, int], rows: int, tokens: int, steps: int, first: int
) -> list[float]:
    """Shown on ranks: train from step `first` on for `steps` steps, and save at the end.

    From step 0 on it begins anew; from any other it continues what `folder` holds, whoever saved
    it.
    """
    model = _small_llama(sizes, tokens)
    apply_fully_sharded(model)
    optimizer = adamw(model.parameters(), Options())
    run = {"sizes": sorted(sizes.items()), "rows": rows, "tokens": tokens}
    batches = byte_batches(steps=first + steps, rows=rows, tokens=tokens)
    if first > 0:
        first = load_checkpoint(folder, model=model, optimizer=optimizer, run=run)
    losses = []
    for batch in batches[first:]:
        own = own_rows(batch)
        losses.append(rank_step(model, optimizer, [own], max_norm=1.0))
    save_checkpoint(folder, step=first + len(losses), model=model, optimizer=optimizer, run=run)
    return losses


def stalls_of_a_save(*, folder: str, sizes: dict[str, int], tokens: int) -> dict[str, float]:
    """Shown on ranks: seconds that a save stops training, in the foreground and background."""
    model = _small_llama(sizes, tokens)
    apply_fully_sharded(model)
    optimizer = adamw(model.parameters(), Options())
    own = _rows_of_this_rank(world_size(), tokens)
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
