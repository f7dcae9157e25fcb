"""The four sharding strategies of FSDP, measured on real ranks instead of asserted.

    row = measured_strategy(model, "hybrid", batch)         on every rank, with a new model each
    row.weights, row.gradients, row.states                  bytes that this rank keeps
    row.weights_between                                     the same between forward and backward
    row.sent, row.sent_in_forward                           bytes that this rank sends

Courses often show such a table without numbers. Two of its usual lines do not hold:

    "hybrid keeps a full copy on each GPU"   A copy is spread over a group of ranks, such as those
                                             of a machine. A forward still gathers, inside of it.
    "gradients and states: parameters are    With `fully_shard` they are parts at rest, and whole
    replicated"                              from forward to backward. DDP's are always whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from recipes_lib.core.checks import check_choice
from recipes_lib.core.ranks import world_size
from recipes_lib.core.ranks.meshes import mesh_of
from recipes_lib.core.ranks.rank_bytes import rank_bytes
from recipes_lib.core.ranks.rank_step import Batch, sum_of_losses
from recipes_lib.core.ranks.traffic import count_traffic
from recipes_lib.parallel.fully_sharded import apply_fully_sharded

STRATEGIES = ("no shard", "gradients and states", "hybrid", "full")
COPIES = 2  # of the model, in the hybrid strategy


@dataclass(frozen=True)
class StrategyBytes:
    """What one rank keeps after a step of AdamW, and what it sends, in bytes."""

    weights: int
    gradients: int
    states: int
    weights_between: int
    sent: int
    sent_in_forward: int


def measured_strategy(model: Any, strategy: str, batch: Batch) -> StrategyBytes:
    """Wrap `model`, a new one, by `strategy`, train a step on this rank's `batch`, and count.

    Every rank calls it. "no shard" is DistributedDataParallel; "hybrid" needs a number of ranks
    that is a multiple of COPIES.
    """
    check_choice(STRATEGIES, strategy=strategy)
    model = _wrapped(model, strategy)
    optimizer = torch.optim.AdamW(model.parameters())
    with count_traffic() as traffic:
        loss = sum_of_losses(model, batch)
        between = rank_bytes(model)
        loss.backward()
    optimizer.step()
    held = rank_bytes(model, optimizer)
    with torch.no_grad(), count_traffic() as in_forward:
        sum_of_losses(model, batch)
    return StrategyBytes(
        weights=held.parameters,
        gradients=held.gradients,
        states=held.states,
        weights_between=between.parameters + between.gathered,
        sent=traffic.sent,
        sent_in_forward=in_forward.sent,
    )


def _wrapped(model: Any, strategy: str) -> Any:
    if strategy == "no shard":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    if strategy == "gradients and states":
        return apply_fully_sharded(model, reshard_after_forward=False)
    if strategy == "hybrid":
        mesh = mesh_of(copies=COPIES, parts=world_size() // COPIES)
        return apply_fully_sharded(model, mesh=mesh)
    return apply_fully_sharded(model)
