"""Activation checkpointing: keep the input of a block, recompute the rest when backward arrives.

Problem    Every block saves some 19 hidden vectors per token (SmolLM2) for backward, times all layers.
Idea       Backward visits one block at a time, so only one block's activations need to exist:

               plain        x0 [a0] x1 [a1] x2 [a2] -> loss      all [a] alive
               "block"      x0      x1      x2      -> loss      [a2] again from x2, used, freed; [a1] …
               "selective"  x0 m0   x1 m1   x2 m2   -> loss      m = what matmuls and attention returned:
                                                                 only norms, RoPE, activations are redone
Saves      Per token and block: all elements but D ("block"), or but 3D + 2Q + 2KV + 2F ("selective").
           One block is whole again while backward is in it.
Costs      "block": one more forward, so a third more arithmetic (divided by `every`); "selective": the
           elementwise operators only. No value or gradient changes by a bit, dropout included.
Use when   Activations are the largest term: long sequences, large batches, frozen weights.
Not when   Weights, optimizer states or the loss set the peak: then it costs time and saves nothing.
In production   `model.gradient_checkpointing_enable()` (newer: `activation_checkpointing_enable()`) or
           `TrainingArguments(gradient_checkpointing=True)`: every block, whole; torchtitan: selective.
Source     Chen et al., arXiv 1604.06174; "Current and New Activation Checkpointing Techniques in
           PyTorch", PyTorch blog, March 2025.

Traps: with the KV cache on, the recomputed block appends its keys and values a second time; a forward
replaced by a closure stays bound to the old block in `copy.deepcopy(model)`. Neither happens here.

Shapes: B batch, S sequence, T = B*S tokens, D hidden, F feed-forward, Q query and KV key width.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from recipes_lib.core.budget import Budget
from recipes_lib.core.causal_lm import decoder_blocks, projection_widths

MODES = ("block", "selective")
# What "selective" keeps. Batched products (bmm) are not among them: in eager attention they are [S, S].
KEPT = [
    getattr(torch.ops.aten, name).default
    for name in (
        "mm",
        "addmm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
]


def apply_activation_checkpointing(model: Any, *, mode: str = "block", every: int = 1) -> Any:
    """Let blocks 0, every, 2*every, … keep little and recompute the rest in backward. Returns `model`.

    Parameter names, hooks, `isinstance` and `copy.deepcopy` work as before; adapters may come before or
    after. To pickle the whole model (its state dict is unchanged), remove the checkpointing first.

    Args:
        mode: "block" keeps the input only, "selective" also what matmuls and fused attention return.
        every: 1 for all blocks, k for every k-th.
    Raises ValueError for an unknown mode, an `every` outside 1 … number of blocks, and a model that is
    checkpointed already. The model's forward raises one for a filled KV cache in training.
    """
    blocks = decoder_blocks(model)
    _check(blocks, mode, every)
    if any(
        hasattr(block, "checkpointed_index") or getattr(block, "gradient_checkpointing", False)
        for block in blocks
    ):
        raise ValueError(
            "this model is checkpointed already: call remove_activation_checkpointing(model) (or that of nested "
            "checkpointing) or, for Hugging Face's own, model.gradient_checkpointing_disable() first"
        )
    # A subclass rather than a new `forward` on the block: nothing is bound to this very block, so a deep
    # copy gets its own, and no reference cycle keeps the model's memory.
    for index in range(0, len(blocks), every):
        blocks[index].__class__ = _checkpointed_class(type(blocks[index]), mode)
        blocks[index].checkpointed_index = index
    return model


def remove_activation_checkpointing(model: Any) -> Any:
    """Give every block its own class back. Raises ValueError if there is nothing to remove."""
    blocks = [block for block in decoder_blocks(model) if isinstance(block, _Checkpointed)]
    if not blocks:
        raise ValueError(
            "this model has no block that apply_activation_checkpointing() has changed"
        )
    for block in blocks:
        block.__class__ = type(block).__bases__[1]
        del block.checkpointed_index
    return model


class _Checkpointed:
    """What is mixed into a block's class. `forward` and not `__call__`: hooks fire once, outside."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        from transformers import Cache

        caches = [value for value in (*args, *kwargs.values()) if isinstance(value, Cache)]
        if not torch.is_grad_enabled() or (
            caches and not self.training
        ):  # no backward, or generation
            return super().forward(*args, **kwargs)
        if any(cache.get_seq_length(self.checkpointed_index) for cache in caches):
            raise ValueError(
                "a filled KV cache cannot pass through checkpointed blocks in training: the recomputed block "
                "would append to it; pass use_cache=False, or generate under model.eval() and torch.no_grad()"
            )
        # An empty cache only collects: without it the result is the same.
        args = [None if isinstance(value, Cache) else value for value in args]
        kwargs = {
            name: None if isinstance(value, Cache) else value for name, value in kwargs.items()
        }
        if "use_cache" in kwargs:
            kwargs["use_cache"] = False
        return checkpoint(
            super().forward, *args, use_reentrant=False, context_fn=self.context_fn, **kwargs
        )


@functools.cache
def _checkpointed_class(block_class: type, mode: str) -> type:
    contexts = functools.partial(create_selective_checkpoint_contexts, KEPT)
    body = {"context_fn": staticmethod(contexts if mode == "selective" else noop_context_fn)}
    # The name stays: FSDP and device maps find blocks by it.
    return type(
        block_class.__name__,
        (_Checkpointed, block_class),
        body | {"__module__": block_class.__module__},
    )


def estimate_activation_checkpointing(
    budget: Budget,
    model: Any,
    *,
    batch_size: int,
    seq_len: int,
    every: int = 1,
    mode: str = "block",
) -> Budget:
    """Activations are what the blocks keep, or what backward holds inside the last block, if that is more.

    Estimate it after the recipes that change the batch, the loss, the precision or the adapters.
    """
    _check(decoder_blocks(model), mode, every)
    if batch_size < 1 or seq_len < 1:
        raise ValueError(f"batch_size={batch_size}, seq_len={seq_len}: both must be 1 or more")
    kept = _kept_outputs(model) if mode == "selective" else 0
    return checkpoint_budget(budget, model, tokens=batch_size * seq_len, every=every, kept=kept)


def _kept_outputs(model: Any) -> int:
    """Elements per token that the matmuls and the attention of one block return."""
    from transformers.pytorch_utils import Conv1D

    config, block = model.config, decoder_blocks(model)[0]
    linear = sum(
        module.nf if isinstance(module, Conv1D) else module.out_features
        for module in block.modules()
        if isinstance(module, Conv1D | torch.nn.Linear)
    )
    if config._attn_implementation == "eager":
        return linear
    q, _, _ = projection_widths(config)
    return linear + q + config.num_attention_heads  # + the log-sum-exp of each head


def _check(blocks: torch.nn.ModuleList, mode: str, every: int) -> None:
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}: choose one of {', '.join(MODES)}")
    if not 1 <= every <= len(blocks):
        raise ValueError(
            f"every={every}: give 1 for all blocks up to {len(blocks)}, the number of blocks"
        )
