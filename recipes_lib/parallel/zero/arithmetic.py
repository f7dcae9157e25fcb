"""What one rank of ZeRO keeps, and what it sends in a step, as PyTorch does it.

In (N - 1) / N of P bytes, for a collective over all weights passes so much of them on in a ring:

    stage   gradients            weights                       together
    0       all-reduce 2         -                             2
    1       all-reduce 2         new values 1                  3, and 2 in the paper
    2       reduce-scatter 1     before forward 1              2
    3       reduce-scatter 1     before forward 1, backward 1  3, less what is gathered once

In stage 3 the embedding and the output layer are gathered once: the gradient of the first needs no
weights, and the second stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from recipes_lib.core.checks import check_choice, check_whole
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.core.model.sizes import parts_needed, tensor_bytes, trainable_bytes
from recipes_lib.parallel._arithmetic import STATES, Kept, kept_whole, part_bytes, trained

STAGES = (0, 1, 2, 3)  # 0 is data parallel


def predicted_rank_bytes(model: Any, *, stage: int, ranks: int, rank: int = 0) -> Kept:
    """What `rank` keeps with AdamW; `model` is the plain one.

    Parts are those that PyTorch makes: whole parameters in stage 1, rows of each parameter in
    stages 2 and 3, which differ only while a step computes. So they need not be equal.
    """
    check_choice(STAGES, stage=stage)
    check_whole(ranks=ranks)
    whole = kept_whole(model)
    if stage == 0:
        return whole
    if stage == 1:
        owners = owners_of([parameter.numel() for parameter in trained(model)], ranks=ranks)
        own = [each for each, owner in zip(trained(model), owners) if owner == rank]
        return whole._replace(states=STATES * sum(map(tensor_bytes, own)))
    gradients = sum(_own_rows(parameter, ranks, rank) for parameter in trained(model))
    weights = sum(_own_rows(parameter, ranks, rank) for parameter in model.parameters())
    return Kept(weights, gradients, STATES * gradients)


def owners_of(sizes: Sequence[int], *, ranks: int) -> list[int]:
    """Which rank steps each parameter: the largest first, each to the rank that has least so far.

    This is what ZeroRedundancyOptimizer does, which never cuts a parameter.
    """
    owners = [0] * len(sizes)
    loads = [0] * ranks
    for index in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        rank = loads.index(min(loads))
        owners[index] = rank
        loads[rank] += sizes[index]
    return owners


def _own_rows(parameter: torch.Tensor, ranks: int, rank: int) -> int:
    """Bytes of the rows of a parameter that `fully_shard` gives to `rank`."""
    rows = parameter.shape[0]
    of_each = parts_needed(rows, ranks)
    own = min(of_each, max(0, rows - rank * of_each))
    return own * tensor_bytes(parameter) // rows


def predicted_sent_bytes(model: Any, *, stage: int, ranks: int) -> float:
    """Bytes that one rank sends per step; `model` is the plain one."""
    check_choice(STAGES, stage=stage)
    check_whole(ranks=ranks)
    if stage < 2:
        collectives = 2 + stage
        return (ranks - 1) / ranks * collectives * trainable_bytes(model)
    part = part_bytes(model.parameters(), ranks) + part_bytes(trained(model), ranks)
    if stage == 3:
        part += part_bytes(decoder_blocks(model).parameters(), ranks)
    return (ranks - 1) * float(part)
