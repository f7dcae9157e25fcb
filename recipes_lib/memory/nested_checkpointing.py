"""Nested activation checkpointing: checkpoints of blocks inside checkpoints of groups of blocks.

Problem    With every block checkpointed, the inputs of all L blocks are what is left: L T D, the
           largest term of a long sequence.
Idea       Keep the input of every group only. Backward first makes a group's other inputs
           again, then one block:

               forward      x0 . . x3 . . x6 . .      -> loss     L/g inputs
               backward     x0 . . x3 . . x6 x7 x8                the last group's own: g - 1 more
                            x0 . . x3 . . x6 x7 [block 8]         one block whole, used, freed
                            x0 . . x3 . . x6 [block 7]  …

Saves      Of L block inputs, each of T D elements, L/g + g - 1 are left. They are fewest at g near
           sqrt(L) (`best_group`): 10 of 30.
Costs      On top of block checkpointing one more forward, but for the last block of each group:
           5 - 1/g forwards' worth of arithmetic instead of 4. Values and gradients stay the same
           to the bit, with dropout too.
Use when   The inputs of the blocks are the largest term: very long sequences, many layers.
Not when   Something else sets the peak, or the inputs fit into host memory (activation_offload:
           less arithmetic); with FSDP or hooks that work between the blocks of a group, and for
           models that do (refused).
In production   None has a flag for it. Megatron-LM `--recompute-method uniform
           --recompute-num-layers g` keeps the inputs of groups, and in backward all activations
           of one group; in JAX, `jax.checkpoint` nests.
Source     Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.

The model's own loop calls the blocks one by one. So all blocks of a group but the last write
down their arguments (each has its own: masks of sliding layers, position embeddings) and return
the hidden states as they came; the last one runs them all. A forward hook on a block that is
not the last of its group therefore sees the group's input.

Shapes: T = B*S tokens of a batch, D hidden, L layers, g blocks of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from recipes_lib.core.model.caches_of_checkpointed_blocks import (
    generates,
    require_no_checkpoints,
    without_caches,
)
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.core.model.mixins import mix_in
from recipes_lib.core.model.probe import proves

# --- the idea: what a learner can copy ------------------------------------------------------------


def nested_by_hand(blocks: Sequence[Callable], hidden: torch.Tensor, *, group: int) -> torch.Tensor:
    """Run `blocks` [B, S, D] -> [B, S, D] in groups: two loops, and a checkpoint in each."""

    def run_group(hidden: torch.Tensor, members: Sequence[Callable]) -> torch.Tensor:
        for block in members:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return hidden

    for first in range(0, len(blocks), group):
        members = blocks[first : first + group]
        # Forward keeps the group's input. Backward runs the group again, and its own
        # checkpoints keep the inputs of its blocks until backward has passed them.
        hidden = checkpoint(run_group, hidden, members, use_reentrant=False)
    return hidden


# --- the technique --------------------------------------------------------------------------------


@proves("exact")
def apply_nested_checkpointing(model: Any, *, group: int) -> Any:
    """Keep the input of every `group`-th block, and recompute in two stages. Returns `model`.

    The last group may be smaller. A `group` of 1 checkpoints every block. Parameter names, adapters
    and `copy.deepcopy` work as before; `take_out(model, Nested)` undoes it.
    """
    blocks = decoder_blocks(model)
    require_no_checkpoints(blocks)
    for first in range(0, len(blocks), group):
        last = min(first + group, len(blocks)) - 1
        shared = _Group(first, last)
        for index in range(first, last + 1):
            # Attributes of the block: a deep copy of the model gets groups of its own.
            mix_in(blocks[index], Nested, checkpointed_index=index, checkpoint_group=shared)
    return model


class _Call(NamedTuple):
    """What a block was called with."""

    forward: Callable  # of the block, as it was before the mixing
    args: list[Any]
    kwargs: dict[str, Any]


class _Group:
    """What the blocks of a group share: the calls that wait until its last block runs them."""

    def __init__(self, first: int, last: int) -> None:
        self.first = first  # the number of the group's first block in the model
        self.last = last
        self.forget()

    def forget(self) -> None:
        self.calls: list[_Call] = []
        # The very tensor that the next block has to get.
        self.handed_on: torch.Tensor | None = None

    def require_next(self, index: int, hidden_states: torch.Tensor) -> None:
        """Raise ValueError unless block `index` of a group gets what the one before handed on."""
        all_before_are_waiting = len(self.calls) == index - self.first
        as_handed_on = not self.calls or hidden_states is self.handed_on
        if not all_before_are_waiting or not as_handed_on:
            raise ValueError(
                f"block {index} did not get what block {index - 1} returned: the model, a hook, "
                f"FSDP or a second checkpoint works between the blocks, so they cannot run as a "
                f"group; use activation_checkpointing"
            )


class Nested:
    """What is mixed into a block. `forward` and not `__call__`: hooks fire once, outside."""

    checkpointed_index: int  # among the blocks; other techniques read this mark
    checkpoint_group: _Group

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Wait for the last block of the group, which runs them all under one checkpoint."""
        group = self.checkpoint_group
        index = self.checkpointed_index
        if index == group.first:
            group.forget()  # an error in an earlier forward may have left some calls
        # A block in eval mode that finds calls of others waiting must not run without them.
        if not group.calls and generates(self, args, kwargs):
            return super().forward(hidden_states, *args, **kwargs)
        _refuse_collecting()
        group.require_next(index, hidden_states)
        args, kwargs = without_caches(args, kwargs, index=index, names=self.forward_arguments[1:])
        group.calls.append(_Call(super().forward, args, kwargs))
        if index < group.last:
            group.handed_on = hidden_states
            return hidden_states  # [B, S, D], the group's input
        calls = group.calls
        group.forget()  # the graph owns the calls from here on
        return checkpoint(_run_group, hidden_states, calls, use_reentrant=False)


def _run_group(hidden: torch.Tensor, calls: list[_Call]) -> torch.Tensor:
    for call in calls:
        hidden = checkpoint(call.forward, hidden, *call.args, use_reentrant=False, **call.kwargs)
    return hidden


def _refuse_collecting() -> None:
    """Raise ValueError if the model collects inputs of blocks: of a group it would see one."""
    from transformers.utils.output_capturing import _active_collector

    if "hidden_states" in (_active_collector.get() or {}):
        raise ValueError(
            "output_hidden_states=True would collect the inputs of groups, not of blocks: pass "
            "False, run under torch.no_grad(), or take it out"
        )


def best_group(layers: int) -> int:
    """The group with the fewest block inputs alive at a time; of several the cheapest."""

    def most_block_inputs(group: int) -> int:
        return layers // group + group - 1  # of whole groups, and of the blocks inside of one

    # Of equal groups `min` takes the first, which is the smallest and recomputes the least.
    return min(range(1, layers + 1), key=most_block_inputs)
