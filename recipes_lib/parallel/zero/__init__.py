"""ZeRO 1, 2 and 3: data parallel without N copies of what each rank could ask the others for.

Problem    Under data parallel every rank keeps all weights, gradients and optimizer states, though
           all of them are equal on all ranks. With AdamW in fp32 that is 16 bytes per parameter, N
           times over.
Idea       Each rank keeps one part of N, and the ranks exchange parts when they need them. For P
           bytes of weights and AdamW:

               stage   weights   gradients   states    what is split
               0       P         P           2 P       nothing: data parallel
               1       P         P           2 P / N   the states
               2       P         P / N       2 P / N   and the gradients
               3       P / N     P / N       2 P / N   and the weights

           Each rank steps its part of the weights, and hands it out.
Saves      Stage 1 half the memory of an fp32 AdamW as N grows, stage 3 all but 1 / N of it and one
           block.
Costs      Stages 1 and 2 need not send more than data parallel: 2 (N-1) / N x P per step. Stage 3
           gathers the blocks in backward once more: up to 3 (N-1) / N x P. So does PyTorch's stage
           1: it averages all gradients, and then hands out the weights.
Use when   The states (1), the gradients (2) or the weights (3) are what does not fit.
Not when   Everything fits: data parallel is the simplest. Activations are what does not fit: ZeRO
           splits none of them.
In production   DeepSpeed's `zero_optimization.stage` (deepspeed.py, launch/deepspeed/*.json);
           `fully_shard` of PyTorch, which is stage 3; `FSDP_RESHARD_AFTER_FORWARD=false` of
           accelerate for stage 2.
Source     Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
           Models", SC 2020, arXiv 1910.02054.

PyTorch's stages differ from the paper's. Stage 1 is ZeroRedundancyOptimizer over DDP: it hands out
whole parameters, so a large embedding lies on one rank, states and all. Stage 2 is `fully_shard`
without resharding: between the steps the weights are split, too. What is sent is the same.

deepspeed  the same stages by DeepSpeed, from launch/deepspeed
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from recipes_lib.core.checks import check_choice
from recipes_lib.core.model.bytes_of_tensors import tensor_bytes, trainable_bytes
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.core.ranks.agreement import agree
from recipes_lib.core.ranks.meshes import one_axis
from recipes_lib.parallel._predicted_bytes import STATES, Kept, kept_whole, part_bytes, trained
from recipes_lib.parallel._sharding import require_new_on_ranks, shard_ends

STAGES = (1, 2, 3)

# --- the idea: what a learner can copy ------------------------------------------------------------


@torch.no_grad()
def step_of_own_part(
    parameters: list[torch.Tensor], owners: list[int], optimizer: torch.optim.Optimizer
) -> None:
    """ZeRO-1 after backward. `optimizer` is over the parameters that this rank owns, no others.

    `owners` has for each parameter the rank that steps it.
    """
    for parameter in parameters:
        distributed.all_reduce(parameter.grad)
        parameter.grad /= distributed.get_world_size()
    optimizer.step()  # states exist for the own part only
    for parameter, owner in zip(parameters, owners):
        distributed.broadcast(parameter, src=owner)  # the new value, to all others


# --- the technique --------------------------------------------------------------------------------


def apply_zero(
    model: Any,
    optimizer_class: type[torch.optim.Optimizer],
    *,
    stage: int,
    mesh: Any = None,
    **optimizer_options: Any,
) -> tuple[Any, torch.optim.Optimizer]:
    """Split the training of `model` over the ranks of `mesh`. A step is `rank_step`.

    Returns what to train with, and its optimizer: in stage 1 a wrapper, in stages 2 and 3 the model
    itself. All ranks start with the weights of rank 0.

    Args:
        optimizer_class: and not an optimizer, which would hold the parameters as they were.
        stage: 1 splits the states, 2 the gradients too, 3 the weights too.
        mesh: a DeviceMesh of one dimension; by default that of all ranks.
        optimizer_options: of the optimizer, such as lr.
    """
    # First of all, so that no rank waits for one that has raised.
    agree(model=model, stage=stage, optimizer=optimizer_class, options=optimizer_options, mesh=mesh)
    check_choice(STAGES, stage=stage)
    require_new_on_ranks(model)
    mesh = one_axis(mesh, such_as="shard")
    group = mesh.get_group()

    if stage == 1:  # DDP averages all gradients, and each rank steps the parameters that it owns
        wrapper = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
        optimizer = ZeroRedundancyOptimizer(
            trained(model),
            optimizer_class=optimizer_class,
            process_group=group,
            **optimizer_options,
        )
        return wrapper, optimizer

    _start_alike(model, group)
    options = {"mesh": mesh, "reshard_after_forward": stage == 3}
    for block in decoder_blocks(model):
        fully_shard(block, **options)
    shard_ends(model, **options)
    fully_shard(model, mesh=mesh)
    # After sharding: these are the parts, and the states will be as large as they are.
    return model, optimizer_class(trained(model), **optimizer_options)


def _start_alike(model: Any, group: distributed.ProcessGroup) -> None:
    """Before ZeRO, give all ranks the weights of rank 0, as DDP does by itself.

    `fully_shard` takes from each rank the part that will be its own. Where ranks start with
    different weights, it would join parts of different models, and say nothing.
    """
    first = distributed.get_global_rank(group, 0)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            distributed.broadcast(tensor, src=first, group=group)


# --- the arithmetic -------------------------------------------------------------------------------


def predicted_rank_bytes(model: Any, *, stage: int, ranks: int) -> Kept:
    """What the first rank of ZeRO keeps with AdamW, and no rank more; `model` is the plain one.

    Parts are those that PyTorch makes: whole parameters in stage 1, rows of each parameter in
    stages 2 and 3, which differ only while a step computes.
    """
    if stage > 1:
        gradients = part_bytes(trained(model), ranks)
        return Kept(part_bytes(model.parameters(), ranks), gradients, STATES * gradients)
    owners = owners_of([parameter.numel() for parameter in trained(model)], ranks=ranks)
    own = [each for each, owner in zip(trained(model), owners) if owner == 0]
    return kept_whole(model)._replace(states=STATES * sum(map(tensor_bytes, own)))


def owners_of(sizes: Sequence[int], *, ranks: int) -> list[int]:
    """Which rank of ZeRO steps each parameter: the largest first, to the rank with least so far.

    This is what ZeroRedundancyOptimizer does, which never cuts a parameter.
    """
    owners = [0] * len(sizes)
    loads = [0] * ranks
    for index in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        rank = loads.index(min(loads))
        owners[index] = rank
        loads[rank] += sizes[index]
    return owners


def predicted_sent_bytes(model: Any, *, stage: int, ranks: int) -> float:
    """Bytes that one rank of ZeRO sends per step; `model` is the plain one.

    In (N - 1) / N of P bytes, for a collective over all weights passes so much on in a ring:

        stage   gradients            weights                       together
        1       all-reduce 2         new values 1                  3, and 2 in the paper
        2       reduce-scatter 1     before forward 1              2
        3       reduce-scatter 1     before forward 1, backward 1  3, less what is gathered once

    In stage 3 the embedding and the output layer are gathered once: the gradient of the first needs
    no weights, and the second stays.
    """
    if stage == 1:
        return (ranks - 1) / ranks * 3 * trainable_bytes(model)
    part = part_bytes(model.parameters(), ranks) + part_bytes(trained(model), ranks)
    if stage == 3:
        part += part_bytes(decoder_blocks(model).parameters(), ranks)
    return (ranks - 1) * float(part)
