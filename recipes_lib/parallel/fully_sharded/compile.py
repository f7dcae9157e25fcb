"""In which order to compile and to shard: both orders, timed in turns on real ranks.

    times = seconds_by_order(make_model, batch)     on every rank
    times["compiled first"], times["sharded first"], times["not compiled"]

A block that is compiled first is a graph, and `fully_shard` gathers its weights around it. A block
that is sharded first is compiled together with the hooks that gather and scatter, which breaks its
graph. On two CPU ranks with four blocks of width 384 and 512 tokens each, the orders did not
differ: 0.420 s and 0.427 s per step in one run, 0.421 s and 0.416 s in the next, and 0.43 s to
0.44 s if nothing is compiled (medians of 9 turns). What was slow in accelerate, 2.4 times as slow
as without compiling on 16 GPUs (its pull request 4022), is a third thing: `torch.compile(block)`
returns a wrapper, and its hooks were not called. `block.compile()`, as here, has no wrapper.
`apply_fully_sharded` refuses the second order, so here it is made by hand.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from recipes_lib.core.checks import check_whole
from recipes_lib.core.measure import timed
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.core.ranks import require_group
from recipes_lib.core.ranks.meshes import default_mesh
from recipes_lib.core.ranks.rank_step import Batch, rank_step
from recipes_lib.core.ranks.shard_groups import shard_in_groups

ORDERS = ("compiled first", "sharded first", "not compiled")


def seconds_by_order(
    make_model: Callable[[], Any], batch: Batch, *, rounds: int = 5, backend: str = "inductor"
) -> dict[str, float]:
    """Seconds per step of each of ORDERS, the median of `rounds` turns after one to warm up.

    Args:
        make_model: makes a causal LM, the same on every rank at every call.
        batch: rows of this rank, [B, S].
        backend: of torch.compile.

    Raises ValueError without a process group, for less than one round, and if the orders do not
    come to the same loss.
    """
    require_group()
    check_whole(rounds=rounds)
    steps = {order: _step(make_model(), batch, order, backend) for order in ORDERS}
    seconds: dict[str, list[float]] = {order: [] for order in ORDERS}
    losses: dict[str, float] = {}
    for number in range(rounds + 1):
        for order, step in steps.items():
            took, losses[order] = timed(step)
            if number > 0:
                seconds[order].append(took)
    if max(losses.values()) - min(losses.values()) > 1e-3 * max(losses.values()):
        raise ValueError(f"the orders come to different losses, {losses}: nothing is compared")
    return {order: statistics.median(taken) for order, taken in seconds.items()}


def _step(model: Any, batch: Batch, order: str, backend: str) -> Callable[[], float]:
    """A training step of a model that is compiled and sharded in this order."""
    blocks = decoder_blocks(model)
    if order == "compiled first":
        for block in blocks:
            block.compile(backend=backend)
    shard_in_groups(model, mesh=default_mesh())
    if order == "sharded first":
        for block in blocks:
            block.compile(backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> float:
        return rank_step(model, optimizer, [batch])

    return step
