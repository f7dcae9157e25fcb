"""Activation checkpointing: keep the input of a block, recompute the rest when backward arrives.

Problem    Every block saves some 19 hidden vectors per token (SmolLM2) until backward reaches it.
Idea       Backward visits one block at a time, so only one block's activations need to exist:

               plain        x0 [a0] x1 [a1] x2 [a2] -> loss   all [a] alive
               "block"      x0      x1      x2      -> loss   [a2] again from x2, used, freed …
               "selective"  x0 m0   x1 m1   x2 m2   -> loss   m: what matmuls and attention gave
Saves      What a block keeps per token shrinks to its input, D elements ("block"), or to
           3D + 2Q + 2KV + 2F ("selective"), where D, Q, KV and F are the widths of hidden states,
           queries, keys, and the feed-forward layer. In backward one block is whole again.
Costs      "block": one more forward, so a third more arithmetic (divided by `every`);
           "selective": the elementwise operators only. Values and gradients stay the same to the
           bit, with dropout too.
Use when   Activations are the largest term: long sequences, large batches, frozen weights.
Not when   Weights, optimizer states or the loss set the peak: it costs time and saves nothing.
In production   `model.activation_checkpointing_enable()` (older: `gradient_checkpointing_enable`):
           every block, whole. It has keywords `every_n_layers=k` and `offload=True`, into host
           memory (transformers 5.17). Only the Trainer takes them from a dict,
           `activation_checkpointing_kwargs`. torchtitan: selective.
Source     Chen et al., arXiv 1604.06174; "Current and New Activation Checkpointing Techniques in
           PyTorch", PyTorch blog, March 2025.

Trap: with the KV cache on, a recomputed block appends its keys a second time. Here it drops an
empty cache in training, and refuses a filled one.

Shapes: B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from recipes_lib.core.checks import check_choice
from recipes_lib.core.model.caches_of_checkpointed_blocks import (
    generates,
    require_no_checkpoints,
    without_caches,
)
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.core.model.mixins import mix_in
from recipes_lib.core.model.probe import proves

# --- the idea: what a learner can copy ------------------------------------------------------------


def checkpointed_by_hand(blocks: Iterable[Callable], hidden: torch.Tensor) -> torch.Tensor:
    """Run `blocks` one after the other, and keep nothing for backward but the input of each.

    `hidden` [B, S, D] must need a gradient. Otherwise autograd never calls `backward` below,
    and the weights of the blocks get no gradient either.

    PyTorch does the same, and it replays the random numbers, too: here dropout would draw others
    the second time.

        for block in blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
    """
    for block in blocks:
        hidden = InputOnly.apply(block, hidden)
    return hidden


class InputOnly(torch.autograd.Function):
    """A block, of which only the input survives forward."""

    @staticmethod
    def forward(ctx: Any, block: Callable, hidden: torch.Tensor) -> torch.Tensor:
        ctx.block = block
        ctx.save_for_backward(hidden)  # [B, S, D]
        return block(hidden)  # in here autograd records nothing

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        hidden = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.block(hidden)  # [B, S, D], and now with everything that backward needs
        output.backward(gradient)  # the weights' gradients go to their `.grad`
        return None, hidden.grad  # the input's goes to the block before


# --- the technique --------------------------------------------------------------------------------


@proves("exact")  # compares logits and gradients before and after
def apply_activation_checkpointing(model: Any, *, mode: str = "block", every: int = 1) -> Any:
    """Let blocks 0, every, 2*every, … keep little, and recompute the rest. Returns `model`.

    Parameter names, hooks and `copy.deepcopy` work as before; adapters may come before or after.
    `take_out(model, Checkpointed)` undoes it.

    Args:
        mode: "block" keeps the input only, "selective" also what matmuls and attention return.
    """
    blocks = decoder_blocks(model)
    check_choice(("block", "selective"), mode=mode)
    require_no_checkpoints(blocks)
    for index in range(0, len(blocks), every):
        mix_in(blocks[index], Checkpointed, checkpointed_index=index, checkpoint_mode=mode)
    return model


class Checkpointed:
    """What `mix_in` mixes into a block, so that it keeps its input and recomputes the rest."""

    checkpointed_index: int  # among the blocks; other techniques read this mark
    checkpoint_mode: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block under PyTorch's `checkpoint`, but for generation, which wants its cache."""
        if generates(self, args, kwargs):
            return super().forward(*args, **kwargs)
        args, kwargs = without_caches(
            args, kwargs, index=self.checkpointed_index, names=self.forward_arguments
        )
        # A reentrant checkpoint, the older kind, gives weights no gradient if the block's input
        # needs none. So it is with adapters on a frozen base.
        options = {"use_reentrant": False}
        if self.checkpoint_mode == "selective":
            options["context_fn"] = partial(create_selective_checkpoint_contexts, KEPT_OPERATORS)
        return checkpoint(super().forward, *args, **options, **kwargs)


# What "selective" keeps: results that take many operations per byte to make again.
# Batched products (bmm) are not among them: in eager attention they are [B, H, S, S].
KEPT_OPERATORS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]
