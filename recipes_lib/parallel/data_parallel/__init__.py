"""Data parallel (DDP): every rank has the whole model and its own rows.

Problem    One device computes one micro-batch at a time, and others stand idle.
Idea       N ranks start from the same weights. Each computes the gradients of its own rows, all
           take the average, and so the same step:

               rank 0   rows 0-3   forward   backward  \\              / step
               rank 1   rows 4-7   forward   backward  / all-reduce   \\ step

           The last block's gradients are ready when most of backward is still to come. DDP puts
           gradients into buckets, and sends a bucket as soon as it is full:

               compute         | backward 3 | backward 2 | backward 1 | backward 0 |
               communication                | bucket 0   | bucket 1   | bucket 2   | bucket 3 |

Saves      Time: N ranks train on N times the rows in the time of one, less what communication is
           not hidden. Memory for activations, which grow with the rows of a rank.
Costs      The whole of weights, gradients and optimizer states on every rank, and 2 (N-1) / N x the
           bytes of the gradients sent per step. The buckets stay, so gradients are never free.
Use when   A training step of one micro-batch fits a device, and there are several devices.
Not when   Weights, gradients and states do not fit (zero, fully_sharded). Nor with an optimizer
           that steps in backward: it would use gradients that are not averaged yet.
In production   `torchrun --nproc-per-node 8 train.py` with DistributedDataParallel; the Hugging
           Face Trainer wraps the model by itself when torchrun starts it.
Source     Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
           VLDB 2020.

That every token weighs the same is the work of core/ranks/weighted_step.py.

lanes  what computes when, and what is sent meanwhile, in one step
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from recipes_lib.core.checks import check_number
from recipes_lib.core.ranks.agreement import agree
from recipes_lib.core.ranks.meshes import one_axis
from recipes_lib.core.ranks.weighted_step import Batch, rank_step, sum_of_losses
from recipes_lib.parallel._sharding import require_new_on_ranks

# --- the idea: what a learner can copy ------------------------------------------------------------


def averaged_by_hand(model: Any) -> None:
    """After backward: each gradient becomes the average over all ranks. No buckets, no overlap."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            distributed.all_reduce(parameter.grad)  # the sum over ranks, on every rank
            parameter.grad /= distributed.get_world_size()


# --- the technique --------------------------------------------------------------------------------


def apply_data_parallel(
    model: Any, *, mesh: Any = None, bucket_megabytes: float = 25.0
) -> DistributedDataParallel:
    """Wrap `model` for training on all ranks of `mesh`. Call the wrapper, not `model`, in training.

    All ranks get the weights of rank 0.

    Args:
        mesh: a DeviceMesh of one dimension; by default that of all ranks.
        bucket_megabytes: MiB of gradients that are sent at a time. With one bucket for the whole
            model everything is sent after backward.
    """
    # First of all, so that no rank waits for one that has raised.
    agree(model=model, bucket_megabytes=bucket_megabytes, mesh=mesh)
    check_number(bucket_megabytes=bucket_megabytes, above=0)
    require_new_on_ranks(model)
    mesh = one_axis(mesh, such_as="replicate")
    wrapper = DistributedDataParallel(
        model,
        process_group=mesh.get_group(),
        bucket_cap_mb=bucket_megabytes,
        gradient_as_bucket_view=True,  # or each gradient would exist twice
    )
    wrapper.averaged_names = _trained_names(model)
    return wrapper


def data_parallel_step(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    *,
    max_norm: float | None = None,
) -> float:
    """`rank_step` of what `apply_data_parallel` returned: ranks average after the last micro-batch.

    DDP does not average what was thawed later, nor adapters that came later.
    """
    changed = sorted(_trained_names(model.module) ^ model.averaged_names)
    if changed:
        raise ValueError(
            f"{len(changed)} parameters began or ceased to train after apply_data_parallel, "
            f"{changed[0]} among them: DDP would not average them, and the ranks would drift "
            f"apart. Freeze parameters and add adapters first"
        )
    return rank_step(model, optimizer, batches, max_norm=max_norm)


def _trained_names(model: Any) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


# --- what came before: replicas in threads of one process -----------------------------------------

# As `torch.nn.DataParallel` runs them. Each step copies the weights to every replica, and adds all
# gradients up on the first one, so both pass one device; and one Python runs one thread at a time.
# On a CPU that class calls the model once, on all rows. By hand its steps can be timed anywhere.


def make_replicas(model: Any, count: int) -> list[Any]:
    """Replicas for data parallelism in one process: `model` itself and `count - 1` copies of it."""
    return [model, *(copy.deepcopy(model) for _ in range(count - 1))]


def threaded_step(
    replicas: Sequence[Any], optimizer: torch.optim.Optimizer, batches: Sequence[Batch], tokens: int
) -> float:
    """One step of the first replica on the rows of all: one batch and one thread for each replica.

    `optimizer` is over the first one's parameters; `tokens` of all batches have a label. Returns
    the mean loss over them.
    """
    first, *others = replicas
    with torch.no_grad():
        for replica in others:
            for target, source in zip(replica.parameters(), first.parameters()):
                target.copy_(source)

    def forward_and_backward(replica: Any, batch: Batch) -> float:
        loss = sum_of_losses(replica, batch) / tokens
        loss.backward()
        return loss.item()

    with ThreadPoolExecutor(max_workers=len(replicas)) as threads:
        # An error in a thread is raised here. Without its gradient, the step would be another one.
        losses = list(threads.map(forward_and_backward, replicas, batches))
    for replica in others:
        for target, source in zip(first.parameters(), replica.parameters()):
            if source.grad is not None:
                target.grad += source.grad
                source.grad = None
    optimizer.step()
    optimizer.zero_grad()
    return sum(losses)
