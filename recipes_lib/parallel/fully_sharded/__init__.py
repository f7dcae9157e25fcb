"""Fully sharded data parallel (FSDP2, ZeRO-3): each rank keeps one N-th of everything.

Problem    Under DDP every rank holds all weights, gradients and AdamW states: 16 bytes per
           parameter in fp32, N times the same.
Idea       A rank keeps a part of each parameter. Two calls of PyTorch set hooks, which put a block
           together when it computes, and take it apart again:

               for block in model.model.layers:
                   fully_shard(block)
               fully_shard(model)          what is left: embedding, last norm, output layer

               rank 0  [W0]  --all-gather-->  [W0 W1]  forward, or backward
               rank 1  [W1]  --all-gather-->  [W0 W1]  forward, or backward
                                              [G0 G1]  --reduce-scatter-->  [G0] rank 0, [G1] rank 1

           AdamW works on the parts, and nobody ever needs the whole.
Saves      Of 16 bytes per parameter P, a rank holds 16 P / N, and one block as a whole beside it:
           in its backward up to four times: gathered, the next one arriving, its gradients, and
           those on their way.
Costs      Weights cross the network twice and gradients once per micro-batch: half as much again as
           DDP. The next block is fetched while this one computes, so a slow network is what shows.
           Gradients of a block are summed as one, so all that trains in it has one dtype.
Use when   Weights, gradients and states do not fit beside each other on one device.
Not when   They fit: DDP sends less. Micro-batches are so small that a block computes faster than
           the next one arrives. The base is in 4 bits: quantized_shards.
In production   torchtitan has the same calls; `accelerate launch` with `fsdp_version: 2`;
           `TrainingArguments(fsdp=…)`, where accelerate on CPUs silently gives DDP instead.
Source     Zhao et al., "PyTorch FSDP" (arXiv 2304.11277); Rajbhandari et al., "ZeRO" (arXiv
           1910.02054); PyTorch, torch.distributed.fsdp.fully_shard.

The order of recipes: adapters, then checkpoints and compiled blocks, then this, then the optimizer.

observed  dtypes in one step, and what the four sharding strategies keep and send
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.core.ranks.agreement import agree
from recipes_lib.core.ranks.collectives import all_gather, reduce_scatter
from recipes_lib.core.ranks.meshes import default_mesh
from recipes_lib.parallel._predicted_bytes import STATES, Kept, part_bytes, trained
from recipes_lib.parallel._sharding import (
    require_new_on_ranks,
    require_same_weights,
    shard_ends,
    sharding_options,
)

# --- the idea: what a learner can copy ------------------------------------------------------------


def linear_of_shards(x: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """x [rows, in] times a weight [out, in], of which each rank has the rows `shard` [out/N, in].

    Backward leaves in `shard.grad` the mean of the ranks' gradients, as DDP would: its part of it.
    """
    return _GatheredLinear.apply(x, shard)


class _GatheredLinear(torch.autograd.Function):
    """Gather, use, forget; in backward gather again, and scatter what was summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, shard)  # and not the whole weight
        return x @ _gather(shard).T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, shard = ctx.saved_tensors
        to_input = gradient @ _gather(shard)
        whole = gradient.T @ x  # [out, in], from the rows of this rank
        part = torch.empty_like(shard)
        reduce_scatter(part, whole)  # distributed.reduce_scatter_tensor
        return to_input, part / distributed.get_world_size()


def _gather(shard: torch.Tensor) -> torch.Tensor:
    """The whole weight [out, in] of the parts [out/N, in] of all ranks."""
    rows, inputs = shard.shape
    whole = shard.new_empty(rows * distributed.get_world_size(), inputs)
    all_gather(whole, shard.detach().contiguous())  # distributed.all_gather_into_tensor
    return whole


# --- the technique --------------------------------------------------------------------------------


def apply_fully_sharded(
    model: Any,
    *,
    mesh: DeviceMesh | None = None,
    parameter_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    offload: bool = False,
) -> Any:
    """Shard the parameters of `model` over the ranks, in place. Returns `model`.

    Every rank calls it, with the same weights, before the optimizer is made. A step is
    `core.ranks.weighted_step.rank_step`, or a loop as in one process: gradients are means over the
    ranks. Parameters are DTensors afterwards; `parameter.full_tensor()` puts one together.

    Args:
        mesh: of one dimension, by default all ranks; or of two (HSDP): parts are spread over the
            second one, such as the GPUs of a machine, and copied along the first. Weights then stay
            inside of a machine, and only parts of gradients cross.
        parameter_dtype: in which blocks are gathered and compute; parts, gradients and states stay.
        reduce_dtype: in which gradients are summed; by default fp32 if `parameter_dtype` is bf16.
        reshard_after_forward: False keeps all blocks whole until backward, as ZeRO-2 does, and
            sends a third less.
        offload: keep parts, gradients and states in host memory, where the optimizer then works.
    """
    switches = (reshard_after_forward, offload, parameter_dtype, reduce_dtype)
    _require_alike(model, mesh=mesh, options=switches)
    if mesh is None:
        mesh = default_mesh()
    options = sharding_options(mesh, parameter_dtype, reduce_dtype, offload)

    # Each call makes a group, which is gathered and taken apart as one. The blocks come first: the
    # call for the model takes what no group has yet.
    for block in decoder_blocks(model):
        fully_shard(block, reshard_after_forward=reshard_after_forward, **options)
    # Embedding and output layer, unless they are tied: then they are among what is left.
    shard_ends(model, reshard_after_forward=reshard_after_forward, **options)
    fully_shard(model, **options)
    return model


def _require_alike(model: Any, **options: Any) -> None:
    """Before FSDP: ValueError on every rank for what would hang, or train something else."""
    agree(model=model, **options)  # first of all, so that no rank waits for one that has raised
    require_new_on_ranks(model)
    if any(hasattr(parameter, "quant_state") for parameter in model.parameters()):
        raise ValueError(
            "this model has weights in 4 bits, whose scales would stay whole on every rank: use "
            "apply_quantized_shards"
        )
    require_same_weights(model)


# --- the arithmetic -------------------------------------------------------------------------------


def predicted_rank_bytes(model: Any, *, ranks: int) -> Kept:
    """Under FSDP: what one of the `ranks` that share a copy of the model keeps, with AdamW."""
    gradients = part_bytes(trained(model), ranks)
    return Kept(part_bytes(model.parameters(), ranks), gradients, STATES * gradients)


def predicted_sent_bytes(model: Any, *, ranks: int, copies: int = 1) -> int:
    """Bytes that one rank of FSDP sends in a step; a forward alone sends less.

    A block is gathered in forward and again in backward, everything else once, and gradients are
    scattered. A ring of N ranks sends (N - 1) / N of a tensor for each of these.

    Over copies (HSDP), which divide the ranks, the parts of the gradients are added up as DDP does.
    """
    shards = ranks // copies
    gathered = part_bytes(model.parameters(), shards)
    gathered += part_bytes(decoder_blocks(model).parameters(), shards)  # once more, in backward
    scattered = part_bytes(trained(model), shards)
    in_a_copy = (gathered + scattered) * (shards - 1)
    between_copies = 2 * scattered * (copies - 1) // copies
    return in_a_copy + between_copies
