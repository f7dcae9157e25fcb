"""The budget of one rank of a sharded model: its parts, and the groups that come and go.

At rest a rank has its parts: 16 P / N bytes of weights, gradients and AdamW states in fp32. Beside
them, with n blocks fetched ahead, these are alive at most:

    a forward that keeps   beside all blocks, the buffers in which the last two have arrived
    the loss               the output layer twice: as it arrived, and put together
    its gradients          the output layer, the last block arriving, gradients of the output layer
    inside the last block  gradients of the output layer on their way, the block, n blocks arriving,
                           gradients of the block
    inside the one before  gradients of the last block on their way, and this rank's part of them;
                           the block, n blocks arriving, gradients of the block
    inside block n         gradients of the block behind on their way, the block, n blocks arriving,
                           gradients of the block. Below it fewer arrive
    the embedding          gradients of the first block on their way, then those of the embedding
                           twice: as they were made, and as they are sent

Blocks that are kept whole from forward to backward do not arrive, and go one by one as backward
leaves them. In the first block, no other is whole.

The list is what PyTorch 2.13 does; a dry run of one rank (`core.dry_ranks`) sees the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from recipes_lib.core.predict.budget import Budget, Shape
from recipes_lib.core.predict.plain_step import (
    activation_bytes,
    block_bytes,
    block_gradient_bytes,
    budget_of,
)
from recipes_lib.parallel._shard_group_bytes import ShardedGroups

STATES_OF_ADAMW = 2  # averages for each number that trains


def sharded_budget(
    budget: Budget,
    model: Any,
    shape: Shape,
    groups: ShardedGroups,
    *,
    reshard_after_forward: bool = True,
    offload: bool = False,
    prefetch: int = 1,
    beside_a_block: int = 0,
) -> Budget:
    """`budget` of one rank when `groups` are sharded. What is gathered counts in its moment's term.

    Those terms are the activations, `one_block` and the copy of the embedding. With `offload` the
    budget is that of the device; the parts are on the host.

    Args:
        beside_a_block: bytes that backward needs in a block beside its weights and gradients.
    """
    kept = groups.rest.gathered
    kept_in_block_n = groups.rest.gathered
    if not reshard_after_forward:
        kept += groups.all_blocks.gathered + groups.embedding.gathered
        kept_in_block_n += groups.block.gathered + groups.embedding.gathered
    on_device = 1
    if offload:
        on_device = 0
    own_gradients = on_device * groups.whole.part_gradients
    blocks_arriving = 0
    if reshard_after_forward:
        blocks_arriving = prefetch
    sharded = budget.change(
        weights=on_device * groups.whole.part,
        states=on_device * STATES_OF_ADAMW * groups.whole.part_gradients,
        gradients=own_gradients,
        carried=own_gradients if shape.micro_batches > 1 else 0,
        last_gradients=on_device * _still_to_come(groups, shape, arriving=blocks_arriving),
        embedding_gradient=0,
    )
    last_block = 0  # which the output layer's backward fetches, whatever `prefetch` is
    if reshard_after_forward:
        last_block = groups.block.gathered
    in_block = beside_a_block + _inside_a_block(
        budget, groups, arriving=blocks_arriving * groups.block.gathered
    )
    begins = kept + _as_backward_begins(
        budget,
        groups,
        arriving=last_block,
        in_block=in_block,
        logits=_logits(model, shape, groups),
    )
    behind = kept_in_block_n + groups.block.sent + in_block
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


def _logits(model: Any, shape: Shape, groups: ShardedGroups) -> _Logits:
    elements = shape.tokens * model.config.vocab_size
    size = min(4, groups.computing)
    return _Logits(in_fp32=4 * elements, computed=size * elements)


def _still_to_come(groups: ShardedGroups, shape: Shape, *, arriving: int) -> int:
    """Bytes of this rank's gradients that are not there yet when backward is in block `arriving`.

    They are those of the embedding, of this block and of the blocks below it. With micro-batches
    all have been there since the first one.
    """
    if shape.micro_batches > 1:
        return 0
    of_blocks = (arriving + 1) * groups.block.part_gradients
    return groups.embedding.part_gradients + min(of_blocks, groups.all_blocks.part_gradients)


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


def _inside_a_block(budget: Budget, groups: ShardedGroups, *, arriving: int) -> int:
    """Bytes of a block in backward: what it saved, its weights, and gradients of both."""
    weights = 0
    if arriving:
        weights = groups.block.gathered + arriving
    # When all its gradients are there, what it had saved is free.
    computing = max(budget.one_block + budget.block_gradients, groups.block.gradients)
    return weights + computing


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


def computing_in(budget: Budget, model: Any, shape: Shape, dtype: torch.dtype | None) -> Budget:
    """The budget whose activations are those of a model that computes in `dtype`, or the same.

    Raises ValueError if recipes have changed the activations, which count in the model's own dtype.
    """
    if dtype is None or dtype == model.dtype:
        return budget
    plain = budget_of(model, shape.micro())
    if budget.activations != plain.activations or budget.one_block != plain.one_block:
        raise ValueError(
            f"parameter_dtype={dtype}: the budget has activations of {model.dtype} that other "
            f"recipes have changed: give a model in {dtype} for the estimates, or no "
            f"parameter_dtype"
        )
    computing = _Computing(model, dtype)
    micro = shape.micro()
    return budget.change(
        activations=activation_bytes(computing, micro),
        one_block=micro.tokens * block_bytes(computing, seq=shape.seq),
        block_gradients=micro.tokens * block_gradient_bytes(computing, seq=shape.seq),
    )


class _Computing:
    """A model, seen as one whose blocks compute in another dtype."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self._model = model
        self.dtype = dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
