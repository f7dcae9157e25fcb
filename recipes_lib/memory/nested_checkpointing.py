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

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from recipes_lib.core.checks import check_whole
from recipes_lib.core.model import recompute
from recipes_lib.core.model.causal_lm import (
    decoder_blocks,
    is_layer_norm,
    norms_of,
    require_causal_lm,
)
from recipes_lib.core.model.mixing import mix_in, unmix
from recipes_lib.core.model.probe import proves
from recipes_lib.core.model.sizes import parts_needed
from recipes_lib.core.predict.budget import Budget, Order, Shape, estimate
from recipes_lib.core.predict.plain_step import (
    embedding_copies,
    require_adapters,
    saved_outside_the_blocks,
    trainable_bytes,
)

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

    Parameter names, `isinstance`, adapters and `copy.deepcopy` work as before. To pickle the
    whole model (its state dict is unchanged), remove the checkpointing first.

    Args:
        group: blocks of a group; the last group may be smaller. 1 checkpoints every block.
    Raises ValueError for a group outside 1 … number of blocks, and for blocks that are checkpointed
    already. The model's forward raises one, where gradients are needed, for a filled KV cache in
    training, for `output_hidden_states=True`, and where something works between the blocks.
    """
    require_causal_lm(model)
    blocks = decoder_blocks(model)
    check_whole(group=group, most=len(blocks))
    recompute.require_no_checkpoints(blocks)
    for first in range(0, len(blocks), group):
        last = min(first + group, len(blocks)) - 1
        shared = _Group(first, last)
        for index in range(first, last + 1):
            # Attributes of the block: a deep copy of the model gets groups of its own.
            names = recompute.argument_names(blocks[index])
            mix_in(
                blocks[index],
                _Nested,
                checkpointed_index=index,
                checkpoint_group=shared,
                argument_names=names,
            )
    return model


def remove_nested_checkpointing(model: Any) -> Any:
    """Give every block its own class back. Raises ValueError if there is nothing to remove."""
    blocks = [block for block in decoder_blocks(model) if isinstance(block, _Nested)]
    if not blocks:
        raise ValueError("this model has no block that apply_nested_checkpointing() has changed")
    for block in blocks:
        attributes = ["checkpointed_index", "checkpoint_group", "argument_names"]
        unmix(block, _Nested, attributes=attributes)
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
        """Raise ValueError unless block `index` gets what the one before it handed on."""
        all_before_are_waiting = len(self.calls) == index - self.first
        as_handed_on = not self.calls or hidden_states is self.handed_on
        if not all_before_are_waiting or not as_handed_on:
            raise ValueError(
                f"block {index} did not get what block {index - 1} returned: the model, a hook, "
                f"FSDP or a second checkpoint works between the blocks, so they cannot run as a "
                f"group; use activation_checkpointing"
            )


class _Nested:
    """What is mixed into a block. `forward` and not `__call__`: hooks fire once, outside."""

    checkpointed_index: int  # among the blocks; other techniques read this mark
    checkpoint_group: _Group
    argument_names: tuple[str, ...]  # of the block's forward, the hidden states first

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        group = self.checkpoint_group
        index = self.checkpointed_index
        if index == group.first:
            group.forget()  # an error in an earlier forward may have left some calls
        # A block in eval mode that finds calls of others waiting must not run without them.
        if not group.calls and recompute.generates(self, args, kwargs):
            return super().forward(hidden_states, *args, **kwargs)
        _refuse_collecting()
        group.require_next(index, hidden_states)
        args, kwargs = recompute.without_caches(
            args, kwargs, index=index, names=self.argument_names[1:]
        )
        group.calls.append(_Call(super().forward, args, kwargs))
        if index < group.last:
            group.handed_on = hidden_states
            return hidden_states  # [B, S, D], the group's input
        calls = group.calls
        group.forget()  # the graph owns the calls from here on
        return checkpoint(_run_group, hidden_states, calls, use_reentrant=False)


def _run_group(hidden: torch.Tensor, calls: list[_Call]) -> torch.Tensor:
    """The blocks of a group, one checkpoint each: [B, S, D] -> [B, S, D]."""
    for call in calls:
        hidden = checkpoint(call.forward, hidden, *call.args, use_reentrant=False, **call.kwargs)
    return hidden


def _refuse_collecting() -> None:
    """Raise ValueError if the model collects the inputs of blocks: of a group it would see one."""
    from transformers.utils.output_capturing import _active_collector

    if "hidden_states" in (_active_collector.get() or {}):
        raise ValueError(
            "output_hidden_states=True would collect the inputs of groups, not of blocks: pass "
            "False, run under torch.no_grad(), or call remove_nested_checkpointing(model)"
        )


def best_group(layers: int) -> int:
    """The group with the fewest block inputs alive at a time; of several the cheapest."""
    check_whole(layers=layers)

    def most_inputs(group: int) -> int:
        return max(_inputs_alive(index, group) for index in range(layers))

    # Of equal groups `min` takes the first, which is the smallest and recomputes the least.
    return min(range(1, layers + 1), key=most_inputs)


def _inputs_alive(index: int, group: int) -> int:
    """Block inputs alive while backward is in block `index`."""
    of_groups = index // group + 1  # up to its own: backward has freed those of later groups
    in_its_group = index % group  # from the group's second block up to this one
    return of_groups + in_its_group


# --- the arithmetic -------------------------------------------------------------------------------


@estimate(Order.CHECKPOINTS)
def estimate_nested_checkpointing(
    budget: Budget, model: Any, shape: Shape, *, group: int
) -> Budget:
    """Activations are the inputs of the groups, or what backward holds in a group, if more.

        backward begins     inputs of all groups + what is saved outside the blocks + the loss
        it is in block i    inputs up to i + all of block i + the gradients inside it
                                + the weights' gradients of the output layer and of later blocks

    Raises ValueError for a budget of adapters that `model` does not have yet.
    """
    require_adapters(budget, model)
    blocks = decoder_blocks(model)
    check_whole(group=group, most=len(blocks))
    groups = parts_needed(len(blocks), group)
    width = model.config.get_text_config().hidden_size
    one_input = shape.tokens * model.dtype.itemsize * width
    inputs_of_groups = groups * one_input
    if budget.dry is not None:
        return _nested_one_by_one(budget, group=group, one_input=one_input)

    activations = _activations_in_blocks(budget, len(blocks), group=group, one_input=one_input)
    gradients = _gradients_in_blocks(budget, blocks)
    with_gradients = max(map(sum, zip(activations, gradients, strict=True)))
    # Where each gradient goes at once, one waits: that of a tied embedding, for its second half.
    without_gradients = max(activations) + embedding_copies(model) // 2
    if _block_saves_its_input(model):
        # `one_block` counts it as well.
        with_gradients -= one_input
        without_gradients -= one_input
    return budget.with_moment_in_a_block(
        as_backward_begins=inputs_of_groups + saved_outside_the_blocks(budget, model),
        in_a_block=with_gradients - budget.carried,  # which `_gradients_in_blocks` has counted
        if_gradients_go=without_gradients,
    )


def _nested_one_by_one(budget: Budget, *, group: int, one_input: int) -> Budget:
    """The same where a dry step has counted each block by itself."""
    count = len(budget.dry.blocks)
    kept = []
    more_inside = []
    for index in range(count):
        first_of_group = index % group == 0
        kept.append(one_input if first_of_group else 0)
        more_inside.append((index % group) * one_input)  # inputs of blocks since the group's first
    dry = budget.dry.keeping(kept, more_inside=more_inside)
    return budget.change(activations=budget.activations - budget.dry.saved + dry.saved, dry=dry)


def _activations_in_blocks(budget: Budget, count: int, *, group: int, one_input: int) -> list[int]:
    """For each block: bytes of inputs, and of all inside it, while backward is in it."""
    inside = budget.one_block + budget.block_gradients
    return [_inputs_alive(index, group) * one_input + inside for index in range(count)]


def _gradients_in_blocks(budget: Budget, blocks: torch.nn.ModuleList) -> Iterator[int]:
    """For each block: bytes of the weights' gradients that are there while backward is in it."""
    still_to_come = budget.last_gradients  # those of the first block, and of the embedding
    for index, block in enumerate(blocks):
        if index > 0:
            still_to_come += trainable_bytes(block)
        yield max(budget.carried, budget.gradients - still_to_come)


def _block_saves_its_input(model: Any) -> bool:
    """Whether a block's first norm saves its input as it is: RMSNorm makes fp32 of 16 bits."""
    first_norm = norms_of(decoder_blocks(model)[0])[0]
    return model.dtype.itemsize == 4 or is_layer_norm(first_norm)
