"""Nested activation checkpointing: checkpoints of blocks inside checkpoints of groups of blocks.

Problem    With every block checkpointed, the inputs of all L blocks are what is left: L T D, the largest term of
           a long sequence.
Idea       Keep the input of every group only. Backward first makes a group's other inputs again, then one block:

               forward      x0 . . x3 . . x6 . .      -> loss         L/g inputs
               backward     x0 . . x3 . . x6 x7 x8                    the last group's own: g - 1 more
                            x0 . . x3 . . x6 x7 [block 8]             one block whole, used, freed
                            x0 . . x3 . . x6 [block 7]  …

Saves      Block inputs: from L to L/g + g - 1 times T D elements; least at g near sqrt(L) (`best_group`): 10 for 30.
Costs      On top of block checkpointing one more forward, but for the last block of each group: 5 - 1/g forwards' worth
           of arithmetic instead of 4. No value or gradient changes by a bit, dropout included.
Use when   The inputs of the blocks are the largest term: very long sequences, many layers, one GPU.
Not when   Something else sets the peak, or the inputs fit into host memory (activation_offload: less arithmetic); with
           FSDP, which would gather and free a block's weights before its group runs (the identity check refuses).
In production   None has a flag for it. Megatron-LM `--recompute-method uniform --recompute-num-layers g` keeps the
           inputs of groups, and in backward all activations of one group; in JAX, `jax.checkpoint` nests.
Source     Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.

The model's own loop calls the blocks one by one. So all blocks of a group but the last write down their arguments (each
has its own: masks of sliding layers, position embeddings) and return the hidden states as they came; the last one runs
them all. A forward hook on a block that is not the last of its group therefore sees the group's input.

Shapes: T = B*S tokens of a batch, D hidden, L layers, g blocks of a group.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from recipes_lib.core.budget import Budget
from recipes_lib.core.causal_lm import decoder_blocks, norms_of
from recipes_lib.core.sizes import tensor_bytes


def apply_nested_checkpointing(model: Any, *, group: int) -> Any:
    """Keep the input of every `group`-th block, and recompute in two stages. Returns `model`.

    Parameter names, `isinstance`, adapters and `copy.deepcopy` work as before. To pickle the whole model (its state
    dict is unchanged), remove the checkpointing first.

    Args:
        group: blocks of a group; the last group may be smaller. 1 is plain checkpointing of every block.
    Raises ValueError for a group outside 1 … number of blocks, and for blocks that are checkpointed already or whose
    forward is replaced. The model's forward raises one, where gradients are needed, for a filled KV cache in training,
    `output_hidden_states=True`, and a model that does more between its blocks than passing the hidden states on.
    """
    blocks = decoder_blocks(model)
    _check(blocks, group)
    if any(
        hasattr(block, "checkpointed_index") or getattr(block, "gradient_checkpointing", False)
        for block in blocks
    ):
        raise ValueError(
            "this model is checkpointed already: call remove_nested_checkpointing(model), "
            "remove_activation_checkpointing(model) or model.gradient_checkpointing_disable() first"
        )
    if any("forward" in vars(block) for block in blocks):
        raise ValueError(
            "a block has a forward of its own (of a device map?), which would hide the checkpoints"
        )
    for index, block in enumerate(blocks):
        if index % group == 0:
            calls = _Calls(index, min(index + group, len(blocks)) - 1)
        # A subclass rather than a new `forward` on the block: a deep copy gets blocks and calls of its own.
        block.__class__ = _nested_class(type(block))
        block.checkpointed_index, block.group_calls = index, calls
    return model


def remove_nested_checkpointing(model: Any) -> Any:
    """Give every block its own class back. Raises ValueError if there is nothing to remove."""
    blocks = [block for block in decoder_blocks(model) if isinstance(block, _Nested)]
    if not blocks:
        raise ValueError("this model has no block that apply_nested_checkpointing() has changed")
    for block in blocks:
        block.__class__ = type(block).__bases__[1]
        del block.checkpointed_index, block.group_calls
    return model


def best_group(layers: int) -> int:
    """The group with the fewest block inputs alive at a time; of several the smallest, which costs the least."""
    if layers < 1:
        raise ValueError(f"layers={layers}: give the number of blocks, 1 or more")
    return min(
        range(1, layers + 1),
        key=lambda group: max(_inputs(index, group) for index in range(layers)),
    )


def _inputs(index: int, group: int) -> int:
    """Block inputs alive while backward is in block `index`: of the groups up to its own, and inside that one."""
    return index // group + 1 + index % group


class _Calls(list):
    """What the blocks of a group were called with, until its last block runs them: (forward, args, kwargs) of each."""

    def __init__(self, first: int, last: int):
        super().__init__()
        self.first, self.last, self.hidden = first, last, None


class _Nested:
    """What is mixed into a block's class. `forward` and not `__call__`: hooks fire once, outside."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        from transformers import Cache

        calls, index = self.group_calls, self.checkpointed_index
        if index == calls.first:
            calls.clear()  # an error in an earlier forward may have left some
        caches = [value for value in (*args, *kwargs.values()) if isinstance(value, Cache)]
        if not calls and (
            not torch.is_grad_enabled() or (caches and not self.training)
        ):  # no backward, or generation
            return super().forward(hidden_states, *args, **kwargs)
        self._refuse(hidden_states, caches)
        # An empty cache only collects: without it the result is the same.
        args = [None if isinstance(value, Cache) else value for value in args]
        kwargs = {
            name: None if isinstance(value, Cache) else value for name, value in kwargs.items()
        }
        if "use_cache" in kwargs:
            kwargs["use_cache"] = False
        calls.append((super().forward, args, kwargs))
        if index < calls.last:
            calls.hidden = hidden_states
            return hidden_states
        group, calls.hidden = list(calls), None
        calls.clear()
        return checkpoint(_run, hidden_states, group, use_reentrant=False)

    def _refuse(self, hidden_states: torch.Tensor, caches: list) -> None:
        from transformers.utils.output_capturing import _active_collector

        calls, index = self.group_calls, self.checkpointed_index
        if "hidden_states" in (_active_collector.get() or {}):
            raise ValueError(
                "output_hidden_states=True would collect the inputs of groups, not of blocks: pass False, run under "
                "torch.no_grad(), or call remove_nested_checkpointing(model)"
            )
        if any(cache.get_seq_length(index) for cache in caches):
            raise ValueError(
                "a filled KV cache cannot pass through checkpointed blocks in training: the recomputed block "
                "would append to it; pass use_cache=False, or generate under model.eval() and torch.no_grad()"
            )
        if getattr(self, "gradient_checkpointing", False):
            raise ValueError(
                "Hugging Face's checkpointing is on, too: call model.gradient_checkpointing_disable()"
            )
        if len(calls) != index - calls.first or (calls and hidden_states is not calls.hidden):
            raise ValueError(
                f"block {index} did not get what block {index - 1} returned: the model, a hook, FSDP or a second "
                f"checkpoint works between the blocks, so they cannot run as a group; use activation_checkpointing"
            )


def _run(hidden: torch.Tensor, group: list[tuple]) -> torch.Tensor:  # [B, S, D]
    for forward, args, kwargs in group:
        hidden = checkpoint(forward, hidden, *args, use_reentrant=False, **kwargs)
        if not isinstance(hidden, torch.Tensor):
            raise ValueError(
                f"a block returned a {type(hidden).__name__} where the hidden states alone are expected"
            )
    return hidden


@functools.cache
def _nested_class(block_class: type) -> type:
    # The name stays: FSDP and device maps find blocks by it.
    return type(
        block_class.__name__, (_Nested, block_class), {"__module__": block_class.__module__}
    )


def estimate_nested_checkpointing(
    budget: Budget, model: Any, *, batch_size: int, seq_len: int, group: int
) -> Budget:
    """Activations are the inputs of the groups, or what backward holds inside a group, if that is more.

    Estimate it after the recipes that change the batch, the attention, the loss, the MLP, the precision or adapters.
    """
    blocks = decoder_blocks(model)
    _check(blocks, group)
    if batch_size < 1 or seq_len < 1:
        raise ValueError(f"batch_size={batch_size}, seq_len={seq_len}: both must be 1 or more")
    count, whole, size = len(blocks), budget.one_block, model.dtype.itemsize
    kept = batch_size * seq_len * size * model.config.hidden_size
    at_loss = (
        -(-count // group) * kept + budget.activations - count * whole
    )  # what is saved outside the blocks stays
    # A block's own input is in `whole` where a norm saves it as it is: RMSNorm saves 16 bits as fp32.
    own = kept * (size == 4 or isinstance(norms_of(blocks[0])[0], torch.nn.LayerNorm))
    missing, inside = budget.last_gradients, []
    for index, block in enumerate(blocks):
        if index:
            missing += sum(tensor_bytes(p) for p in block.parameters() if p.requires_grad)
        gradients = max(
            budget.carried, budget.gradients - missing
        )  # of the output layer and of the blocks behind
        inside.append(
            _inputs(index, group) * kept
            - own
            + whole
            + budget.block_gradients
            + gradients
            - budget.carried
        )
    return budget.change(activations=max(at_loss, max(inside) - budget.after_activations))


def _check(blocks: torch.nn.ModuleList, group: int) -> None:
    if not 1 <= group <= len(blocks):
        raise ValueError(
            f"group={group}: give 1 or more, up to {len(blocks)}, the number of blocks (try best_group)"
        )
