"""Bytes of the groups in which a model is sharded: gathered, sent, and at rest on one rank.

What a group is tells shard_groups.py. Rows that the ranks do not divide are padded, and the padding
counts: it is gathered and sent like the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from recipes_lib.core.checks import check_whole
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.core.model.sizes import parts_needed
from recipes_lib.core.ranks.shard_groups import summing_dtype, ties_weights


@dataclass(frozen=True)
class GroupBytes:
    """Bytes of the parameters that are gathered together, as a whole and padded for N ranks.

    `gathered` in the dtype in which they compute, `gradients` in the same, as backward makes them,
    `sent` in the dtype in which they are summed, and `part` and `part_gradients` of one rank at
    rest.
    """

    gathered: int = 0
    gradients: int = 0
    sent: int = 0
    part: int = 0
    part_gradients: int = 0

    def __add__(self, other: GroupBytes) -> GroupBytes:
        """Both groups, counted together."""
        sums = {name: size + getattr(other, name) for name, size in vars(self).items()}
        return GroupBytes(**sums)


@dataclass(frozen=True)
class ShardedGroups:
    """The groups of a model: its largest block, all blocks, and those around them."""

    block: GroupBytes
    all_blocks: GroupBytes
    embedding: GroupBytes  # nothing, if it shares its weight with the output layer
    head: GroupBytes
    rest: GroupBytes  # what no other group has; with it such a shared weight
    computing: int  # bytes of a number in the dtype in which the blocks compute

    @property
    def whole(self) -> GroupBytes:
        """All groups, counted together."""
        return self.all_blocks + self.embedding + self.head + self.rest


def sharded_groups(
    model: Any,
    *,
    shards: int,
    parameter_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    cut_ends: bool = False,
) -> ShardedGroups:
    """Bytes of the groups in which `shard_in_groups` shards `model`, over `shards` ranks.

    `model` is not sharded yet, and may be on the meta device. With `cut_ends` the embedding and the
    output layer are frozen parts that are never gathered whole. Raises ValueError for shards below
    1.
    """
    check_whole(shards=shards)
    reduce_dtype = summing_dtype(parameter_dtype, reduce_dtype)
    computing = model.dtype if parameter_dtype is None else parameter_dtype
    dtypes = (parameter_dtype, reduce_dtype)
    blocks = decoder_blocks(model)
    sizes = [_group(block.parameters(), shards, *dtypes) for block in blocks]
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    around = []
    if not ties_weights(model):
        around = [embedding, head]
    inside = {parameter for module in [*blocks, *around] for parameter in module.parameters()}
    rest = [parameter for parameter in model.parameters() if parameter not in inside]
    of_around = [GroupBytes(), GroupBytes()]
    if around:
        of_around = [_group(module.parameters(), shards, *dtypes) for module in around]
    of_rest = _group(rest, shards, *dtypes)
    if cut_ends:
        of_around = [GroupBytes(part=group.part) for group in of_around]
        if not around:  # all that is left beside a shared weight is a norm
            of_rest = GroupBytes(part=of_rest.part)
    return ShardedGroups(
        block=max(sizes, key=_gathered),
        all_blocks=sum(sizes, GroupBytes()),
        embedding=of_around[0],
        head=of_around[1],
        rest=of_rest,
        computing=computing.itemsize,
    )


def _gathered(group: GroupBytes) -> int:
    return group.gathered


def _group(
    parameters: Iterable[nn.Parameter],
    shards: int,
    parameter_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
) -> GroupBytes:
    gathered = 0
    gradients = 0
    sent = 0
    part = 0
    part_gradients = 0
    for parameter in parameters:
        part_elements = _part_elements(parameter.shape, shards)
        elements = shards * part_elements
        own = parameter.element_size()
        computing = own
        # Whole numbers, such as weights in 4 bits, are gathered as they are.
        if parameter_dtype is not None and parameter.is_floating_point():
            computing = parameter_dtype.itemsize
        gathered += elements * computing
        part += part_elements * own
        if parameter.requires_grad:
            summing = computing
            if reduce_dtype is not None:
                summing = reduce_dtype.itemsize
            gradients += parameter.numel() * computing
            sent += elements * summing
            part_gradients += part_elements * own
    return GroupBytes(gathered, gradients, sent, part, part_gradients)


def _part_elements(shape: torch.Size, shards: int) -> int:
    """Elements of a rank's part. It is padded to as many rows as the first rank has."""
    if not shape:
        return 1
    rows, *others = shape
    elements = parts_needed(rows, shards)
    for size in others:
        elements *= size
    return elements
