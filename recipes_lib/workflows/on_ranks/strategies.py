"""The strategies by name: what each makes of a model on every rank, and how it takes a step.

    training = STRATEGIES["FSDP (ZeRO-3)"](model, options)
    loss = training.step(batch)          # the whole batch; the strategy takes its part

Each function is a few lines: they are what a training script has to change to go from one strategy
to another. All get the same whole batch of a step, so one can see what each of them takes:

    DDP, ZeRO, FSDP, HSDP    some rows
    tensor parallel          all rows; each rank computes a part of every product
    pipeline                 all rows, in micro-batches; each rank computes some blocks
    context parallel         all rows; each rank computes some tokens of each
    FSDP x TP                some rows per pair of ranks, and a part of every product
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from recipes_lib.core.ranks import group_device, world_size
from recipes_lib.core.ranks.collectives import sums_over_ranks
from recipes_lib.core.ranks.gradient_norm import clip_gradients
from recipes_lib.core.ranks.meshes import mesh_of
from recipes_lib.core.ranks.weighted_step import Batch, counted_tokens, rank_rows, rank_step
from recipes_lib.parallel.context_parallel import (
    apply_context_parallel,
    loss_of_all,
    shard_sequence,
    sum_gradients,
)
from recipes_lib.parallel.data_parallel import apply_data_parallel, data_parallel_step
from recipes_lib.parallel.fully_sharded import apply_fully_sharded
from recipes_lib.parallel.pipeline_parallel import apply_pipeline_parallel
from recipes_lib.parallel.tensor_parallel import apply_tensor_parallel
from recipes_lib.parallel.zero import apply_zero

# Adam divides each gradient by its own size. Where one is near zero, the order of a sum decides the
# direction of its step. With a larger epsilon it rests, and strategies compare digit by digit.
EPSILON = 1e-3


@dataclass(frozen=True)
class Options:
    """What all strategies have in common."""

    learning_rate: float = 1e-3
    max_norm: float = 1.0
    micro_batches: int = 4  # of a pipeline


@dataclass(frozen=True)
class Training:
    """What one rank trains: modules, the optimizer, and a step on a whole batch."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[Batch], float]


Build = Callable[[Any, Options], Training]


def adamw(parameters: Any, options: Options) -> torch.optim.Optimizer:
    """The optimizer of all strategies."""
    return torch.optim.AdamW(parameters, lr=options.learning_rate, eps=EPSILON)


def own_rows(batch: Batch, *, mesh: Any = None) -> Batch:
    """For a strategy: the rows of this rank, on its device."""
    rows = rank_rows(len(batch["input_ids"]), mesh=mesh)
    return {name: tensor[rows].to(group_device()) for name, tensor in batch.items()}


# --- the strategies -------------------------------------------------------------------------------


def alone(model: Any, options: Options) -> Training:
    """The strategy of one process: what the others are compared with."""
    optimizer = adamw(model.parameters(), options)

    def step_alone(batch: Batch) -> float:
        """A step of one process, which all strategies are compared with."""
        return rank_step(model, optimizer, [batch], max_norm=options.max_norm)

    return Training(model, optimizer, step_alone)


def data_parallel(model: Any, options: Options) -> Training:
    """The strategy DDP: everything whole, other rows."""
    wrapped = apply_data_parallel(model)
    optimizer = adamw(wrapped.parameters(), options)

    def ddp_step(batch: Batch) -> float:
        return data_parallel_step(wrapped, optimizer, [own_rows(batch)], max_norm=options.max_norm)

    return Training(wrapped, optimizer, ddp_step)


def zero(model: Any, options: Options, *, stage: int) -> Training:
    """The strategies of ZeRO: states, then gradients, then weights are split."""
    trained, optimizer = apply_zero(
        model, torch.optim.AdamW, stage=stage, lr=options.learning_rate, eps=EPSILON
    )

    def zero_step(batch: Batch) -> float:
        return rank_step(trained, optimizer, [own_rows(batch)], max_norm=options.max_norm)

    return Training(trained, optimizer, zero_step)


def fully_sharded(model: Any, options: Options, *, mesh: Any = None) -> Training:
    """The strategy FSDP2, block by block; with a mesh of two dimensions, copies of shards."""
    apply_fully_sharded(model, mesh=mesh)
    optimizer = adamw(model.parameters(), options)

    def fsdp_step(batch: Batch) -> float:
        return rank_step(model, optimizer, [own_rows(batch)], max_norm=options.max_norm)

    return Training(model, optimizer, fsdp_step)


def hybrid(model: Any, options: Options) -> Training:
    """The strategy HSDP: shards within a pair of ranks, copies across pairs."""
    return fully_sharded(model, options, mesh=mesh_of(replicate=world_size() // 2, shard=2))


def tensor_parallel(model: Any, options: Options) -> Training:
    """The strategy TP: every product cut over the ranks, all rows on each."""
    apply_tensor_parallel(model)
    optimizer = adamw(model.parameters(), options)

    def tensor_parallel_step(batch: Batch) -> float:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        _update_by_strategy(model, optimizer, options)
        return loss.item()

    return Training(model, optimizer, tensor_parallel_step)


def sharded_and_cut(model: Any, options: Options) -> Training:
    """The strategy FSDP x TP: first cut over pairs of ranks, then shard over the pairs."""
    mesh = mesh_of(data=world_size() // 2, tensor=2)
    apply_tensor_parallel(model, mesh=mesh["tensor"])
    apply_fully_sharded(model, mesh=mesh["data"])
    optimizer = adamw(model.parameters(), options)

    def fsdp_and_tensor_step(batch: Batch) -> float:
        """A step of FSDP x TP: every token weighs the same."""
        rows = own_rows(batch, mesh=mesh["data"])
        tokens = counted_tokens(rows["labels"], mesh=mesh["data"])
        # The sum over the own rows, divided by the tokens of all rows.
        loss = model(**rows, num_items_in_batch=tokens, use_cache=False).loss
        # FSDP averages over the pairs, and the gradient of the whole batch is their sum.
        (loss * mesh["data"].size()).backward()
        _update_by_strategy(model, optimizer, options)
        (total,) = sums_over_ranks(loss.item(), mesh=mesh["data"])
        return total

    return Training(model, optimizer, fsdp_and_tensor_step)


def context_parallel(model: Any, options: Options, *, kind: str) -> Training:
    """The strategy CP: a part of the tokens of every row on each rank."""
    apply_context_parallel(model, kind=kind)
    optimizer = adamw(model.parameters(), options)

    def context_parallel_step(batch: Batch) -> float:
        """A step of the strategy CP: gradients and losses are summed over the parts."""
        part = shard_sequence(model, batch["input_ids"], batch["labels"])
        loss = model(**part).loss  # of the own tokens, divided by the number of all
        loss.backward()
        sum_gradients(model)
        _update_by_strategy(model, optimizer, options)
        return loss_of_all(model, loss)

    return Training(model, optimizer, context_parallel_step)


def pipeline(model: Any, options: Options) -> Training:
    """The strategy PP: some blocks on each rank, micro-batches through all of them."""
    stages = apply_pipeline_parallel(model, micro_batches=options.micro_batches)
    optimizer = adamw(stages.parameters(), options)

    def pipeline_step(batch: Batch) -> float:
        loss = stages.step(batch["input_ids"], batch["labels"])
        stages.clip_gradients(options.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(torch.nn.ModuleList(stages.stages), optimizer, pipeline_step)


def _update_by_strategy(model: Any, optimizer: torch.optim.Optimizer, options: Options) -> None:
    clip_gradients(model.parameters(), options.max_norm)
    optimizer.step()
    optimizer.zero_grad()


STRATEGIES: dict[str, Build] = {
    "one process": alone,
    "DDP": data_parallel,
    "ZeRO-1": partial(zero, stage=1),
    "ZeRO-2": partial(zero, stage=2),
    "FSDP (ZeRO-3)": fully_sharded,
    "HSDP": hybrid,
    "tensor parallel": tensor_parallel,
    "pipeline (1F1B)": pipeline,
    "context parallel (ring)": partial(context_parallel, kind="ring"),
    "context parallel (Ulysses)": partial(context_parallel, kind="ulysses"),
    "FSDP × TP": sharded_and_cut,
}
