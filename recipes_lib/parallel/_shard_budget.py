"""The budget of one rank of a sharded model: its parts, and the groups that come and go.

A group is what one `fully_shard` gathers: every block; the embedding and the output layer, if they
do not share their weight; and what is left. Rows that the ranks do not divide are padded, and the
padding counts: it is gathered and sent like the rest.

At rest a rank has its parts: 16 P / N bytes of weights, gradients and AdamW states in fp32. Beside
them these are alive at most:

    a forward that keeps   beside all blocks, the buffers in which the last two have arrived
    the loss               the output layer twice: as it arrived, and put together
    its gradients          the output layer, the last block arriving, gradients of the output layer
    inside the last block  gradients of the output layer on their way, the block, the next one
                           arriving, gradients of the block
    inside the one before  gradients of the last block on their way, and this rank's part of them;
                           the block, the next one arriving, gradients of the block
    inside the second      gradients of the block behind on their way, the block, the first one
                           arriving, gradients of the block. In the first one no other is whole
    the embedding          gradients of the first block on their way, then those of the embedding
                           twice: as they were made, and as they are sent

Blocks that are kept whole from forward to backward do not arrive, and go one by one as backward
leaves them.

The list is what PyTorch 2.13 does; a dry run of one rank (`core.predict.dry_ranks`) sees the same.
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
from recipes_lib.core.predict.budget import Budget, Shape
from recipes_lib.parallel._sharding import ties_weights

STATES_OF_ADAMW = 2  # averages for each number that trains

# --- bytes of the groups --------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupBytes:
    """Bytes of the parameters that are gathered together, as a whole and padded for N ranks.

    `gradients` as backward makes them, `sent` as they are summed, and `part` and `part_gradients`
    of one rank at rest.
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

    @property
    def whole(self) -> GroupBytes:
        """All groups, counted together."""
        return self.all_blocks + self.embedding + self.head + self.rest


def sharded_groups(model: Any, *, shards: int) -> ShardedGroups:
    """Bytes of the groups over `shards` ranks. `model` is not sharded; it may be on "meta"."""
    check_whole(shards=shards)
    blocks = list(decoder_blocks(model))
    sizes = [_group(block.parameters(), shards) for block in blocks]
    ends = []
    of_ends = [GroupBytes(), GroupBytes()]
    if not ties_weights(model):
        ends = [model.get_input_embeddings(), model.get_output_embeddings()]
        of_ends = [_group(end.parameters(), shards) for end in ends]
    inside = {parameter for module in [*blocks, *ends] for parameter in module.parameters()}
    rest = [parameter for parameter in model.parameters() if parameter not in inside]
    return ShardedGroups(
        block=max(sizes, key=_gathered),
        all_blocks=sum(sizes, GroupBytes()),
        embedding=of_ends[0],
        head=of_ends[1],
        rest=_group(rest, shards),
    )


def _gathered(group: GroupBytes) -> int:
    return group.gathered


def _group(parameters: Iterable[nn.Parameter], shards: int) -> GroupBytes:
    total = GroupBytes()
    for parameter in parameters:
        part = _part_elements(parameter.shape, shards) * parameter.element_size()
        total += GroupBytes(gathered=shards * part, part=part)
        if parameter.requires_grad:
            made = parameter.numel() * parameter.element_size()
            total += GroupBytes(gradients=made, sent=shards * part, part_gradients=part)
    return total


def _part_elements(shape: torch.Size, shards: int) -> int:
    """Elements of a rank's part. It is padded to as many rows as the first rank has."""
    rows, *others = shape
    return parts_needed(rows, shards) * torch.Size(others).numel()


# --- the budget -----------------------------------------------------------------------------------


def sharded_budget(
    budget: Budget,
    model: Any,
    shape: Shape,
    groups: ShardedGroups,
    *,
    reshard_after_forward: bool = True,
) -> Budget:
    """`budget` of one rank when `groups` are sharded. What is gathered counts in its moment's term.

    Those terms are the activations, `one_block` and the copy of the embedding.
    """
    kept = groups.rest.gathered
    kept_in_second_block = groups.rest.gathered
    arriving = groups.block.gathered
    blocks_to_come = 2  # whose gradients are not there yet in the second block: its own, the first
    if not reshard_after_forward:
        kept += groups.all_blocks.gathered + groups.embedding.gathered
        kept_in_second_block += groups.block.gathered + groups.embedding.gathered
        arriving = 0
        blocks_to_come = 1
    own_gradients = groups.whole.part_gradients
    carried = 0
    of_blocks = min(blocks_to_come * groups.block.part_gradients, groups.all_blocks.part_gradients)
    still_to_come = groups.embedding.part_gradients + of_blocks
    if shape.micro_batches > 1:  # then all have been there since the first one
        carried = own_gradients
        still_to_come = 0
    sharded = budget.change(
        weights=groups.whole.part,
        states=STATES_OF_ADAMW * own_gradients,
        gradients=own_gradients,
        carried=carried,
        last_gradients=still_to_come,
        embedding_gradient=0,
    )
    # When all gradients of a block are there, what it had saved is free.
    in_block = max(budget.one_block + budget.block_gradients, groups.block.gradients)
    if arriving:
        in_block += groups.block.gathered + arriving
    begins = kept + _as_backward_begins(
        budget, groups, arriving=arriving, in_block=in_block, logits=_logits(model, shape)
    )
    behind = kept_in_second_block + groups.block.sent + in_block
    return sharded.change(
        activations=begins - sharded.after_activations,
        one_block=behind - sharded.block_gradients,
        embedding_gradient=groups.rest.gathered + _at_the_embedding(groups),
    )


@dataclass(frozen=True)
class _Logits:
    """Bytes of one tensor [T, V]: in fp32, and in the dtype in which the model computes."""

    in_fp32: int
    computed: int

    @property
    def beside(self) -> int:
        """Bytes of the computed logits, if the loss needs a copy of them in fp32."""
        return self.computed if self.computed < self.in_fp32 else 0


def _logits(model: Any, shape: Shape) -> _Logits:
    elements = shape.tokens * model.config.vocab_size
    size = min(4, model.dtype.itemsize)
    return _Logits(in_fp32=4 * elements, computed=size * elements)


def _as_backward_begins(
    budget: Budget, groups: ShardedGroups, *, arriving: int, in_block: int, logits: _Logits
) -> int:
    """Bytes beside the parts and what is kept whole: the worst from the loss to the last block.

    The gradient that the output layer leaves for a shared weight stays until the embedding's comes.
    """
    head = groups.head
    shared = groups.rest.gradients
    activations = budget.activations
    moments = {
        "the output layer arrives, and the buffer of the last block goes": activations
        + 2 * head.gathered
        + groups.block.gathered,
        "the loss, and the buffer in which the output layer arrived": activations
        + 2 * logits.in_fp32
        + logits.beside
        + 2 * head.gathered,
        "gradients of the loss": activations + 3 * logits.in_fp32 + head.gathered,
        "gradients of the output layer are made": activations
        + logits.computed
        + head.gathered
        + arriving
        + head.gradients
        + shared,
        "and sent": activations + arriving + head.gradients + head.sent + head.part_gradients,
        "the last block": activations
        - budget.one_block
        + head.sent
        + head.part_gradients
        + shared
        + in_block,
    }
    if not arriving:
        # In forward. The blocks are kept whole, and count elsewhere; a buffer for each comes and
        # goes beside them.
        moments["the last block arrives, and the buffer of the one before goes"] = (
            activations - budget.one_block + 2 * groups.block.gathered
        )
    if groups.all_blocks.gathered > groups.block.gathered:
        freed = 0
        if not arriving:  # the last block, which was kept whole
            freed = groups.block.gathered
        moments["the block before"] = (
            activations
            - 2 * budget.one_block
            - freed
            + head.part_gradients
            + groups.block.sent
            + groups.block.part_gradients
            + shared
            + in_block
        )
    return max(moments.values())


def _at_the_embedding(groups: ShardedGroups) -> int:
    """Bytes beside the parts when the last gradients are made and sent."""
    last = groups.embedding
    tensors = 1
    if not last.gathered:
        # A shared weight has two gradients, one of each use, and their sum is a third tensor.
        last = groups.rest
        tensors = 3
    made = groups.block.sent + tensors * last.gradients - last.part_gradients
    return max(made, last.gradients + last.sent)
