"""Activation checkpointing: keep the input of a block, recompute the rest when backward arrives.

Problem    Every block saves some 19 hidden vectors per token (SmolLM2) until backward reaches it.
Idea       Backward visits one block at a time, so only one block's activations need to exist:

               plain        x0 [a0] x1 [a1] x2 [a2] -> loss   all [a] alive
               "block"      x0      x1      x2      -> loss   [a2] again from x2, used, freed …
               "selective"  x0 m0   x1 m1   x2 m2   -> loss   m: what matmuls and attention gave;
                                                              norms, RoPE, activations again
Saves      What a block keeps per token shrinks to D elements ("block"), or to
           3D + 2Q + 2KV + 2F ("selective"). One block is whole again while backward is in it.
Costs      "block": one more forward, so a third more arithmetic (divided by `every`);
           "selective": the elementwise operators only. Values and gradients stay the same to the
           bit, with dropout too.
Use when   Activations are the largest term: long sequences, large batches, frozen weights.
Not when   Weights, optimizer states or the loss set the peak: it costs time and saves nothing.
In production   `model.gradient_checkpointing_enable()` (newer:
           `activation_checkpointing_enable()`) or `TrainingArguments(gradient_checkpointing=True)`:
           every block, whole. `gradient_checkpointing_kwargs={"offload": True}` also moves the
           blocks' inputs into host memory (transformers 5.17), `{"every_n_layers": k}` checkpoints
           every k-th block. torchtitan: selective.
Source     Chen et al., arXiv 1604.06174; "Current and New Activation Checkpointing Techniques in
           PyTorch", PyTorch blog, March 2025.

Traps: with the KV cache on, the recomputed block appends its keys and values a second time; a
forward replaced by a closure stays bound to the old block in `copy.deepcopy(model)`. Neither
happens here.

Shapes: B batch, S sequence, T = B*S tokens, D hidden, F feed-forward, Q query and KV key width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from recipes_lib.core.checks import check_choice, check_whole
from recipes_lib.core.model.causal_lm import decoder_blocks, projection_widths, require_causal_lm
from recipes_lib.core.model.marks import CHECKPOINTED_INDEX, mark, unmark
from recipes_lib.core.model.mixing import mix_in, require_forward_of_class, unmix
from recipes_lib.core.model.recompute import (
    argument_names,
    caches_among,
    nothing_to_recompute,
    require_empty,
    require_no_checkpoints,
    require_no_other_state,
    without_caches,
)
from recipes_lib.core.model.sizes import tensor_bytes
from recipes_lib.core.predict.budget import Budget, Order, Shape, estimate
from recipes_lib.core.predict.plain_step import (
    embedding_copies,
    features,
    head_of,
    head_trains,
    is_linear,
    require_adapters,
    saved_outside_the_blocks,
)

# --- the idea: what a learner can copy ------------------------------------------------------------


def checkpointed_by_hand(blocks: Iterable[Callable], hidden: torch.Tensor) -> torch.Tensor:
    """Run `blocks` one after the other, and keep nothing for backward but the input of each.

    `hidden` [B, S, D] must need a gradient. Otherwise autograd never calls `backward` below,
    and the weights of the blocks get no gradient either. Dropout would draw other numbers the
    second time.
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


def apply_activation_checkpointing(model: Any, *, mode: str = "block", every: int = 1) -> Any:
    """Let blocks 0, every, 2*every, … keep little, and recompute the rest. Returns `model`.

    Parameter names, hooks, `isinstance` and `copy.deepcopy` work as before; adapters may come
    before or after. To pickle the whole model (its state dict is unchanged), remove the
    checkpointing first.

    Args:
        mode: "block" keeps the input only, "selective" also what matmuls and attention return.
        every: 1 for all blocks, k for every k-th.
    Raises ValueError for an unknown mode, an `every` outside 1 … number of blocks, and a model
    that is no causal LM, is checkpointed already, or has blocks with a forward of their own, as a
    device map sets it. The model's forward raises one for a filled KV cache in training.
    """
    require_causal_lm(model)
    blocks = decoder_blocks(model)
    _check(blocks, mode, every)
    require_no_checkpoints(blocks)
    require_forward_of_class(blocks)
    for index in range(0, len(blocks), every):
        names = argument_names(blocks[index])
        contexts = CONTEXTS[mode]
        mix_in(blocks[index], _Checkpointed, checkpoint_contexts=contexts, argument_names=names)
        mark(blocks[index], CHECKPOINTED_INDEX, index)
    return model


def remove_activation_checkpointing(model: Any) -> Any:
    """Give every block its own class back. Raises ValueError if there is nothing to remove."""
    blocks = [block for block in decoder_blocks(model) if isinstance(block, _Checkpointed)]
    if not blocks:
        raise ValueError(
            "this model has no block that apply_activation_checkpointing() has changed"
        )
    for block in blocks:
        unmix(block, _Checkpointed, attributes=["checkpoint_contexts", "argument_names"])
        unmark(block, CHECKPOINTED_INDEX)
    return model


class _Checkpointed:
    """What is mixed into a block. `forward` and not `__call__`: hooks fire once, outside."""

    # Makes two contexts, as torch's `checkpoint` wants them: one around the forward and one around
    # the recomputation. The first may keep what operators return, for the second to use.
    checkpoint_contexts: Callable[[], tuple]
    argument_names: tuple[str, ...]  # of the block's forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        caches = caches_among(args, kwargs)
        if nothing_to_recompute(self, caches):
            return super().forward(*args, **kwargs)
        require_empty(caches, index=getattr(self, CHECKPOINTED_INDEX))
        require_no_other_state(self.argument_names, args, kwargs)
        args, kwargs = without_caches(args, kwargs)
        # A reentrant checkpoint, the older kind, gives weights no gradient if the block's input
        # needs none. So it is with adapters on a frozen base.
        options = {"use_reentrant": False}
        # torch.compile knows no contexts but the selective ones, not even those that do nothing.
        if self.checkpoint_contexts is not noop_context_fn:
            options["context_fn"] = self.checkpoint_contexts
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


def _keep_matmuls() -> tuple:
    return create_selective_checkpoint_contexts(KEPT_OPERATORS)


CONTEXTS = {"block": noop_context_fn, "selective": _keep_matmuls}


# --- guards ---------------------------------------------------------------------------------------


def _check(blocks: torch.nn.ModuleList, mode: str, every: int) -> None:
    check_choice(CONTEXTS, mode=mode)
    check_whole(every=every, least=1, most=len(blocks))


# --- the arithmetic -------------------------------------------------------------------------------


@estimate(Order.CHECKPOINTS)
def estimate_activation_checkpointing(
    budget: Budget, model: Any, shape: Shape, *, mode: str = "block", every: int = 1
) -> Budget:
    """Activations are what the blocks keep, or what backward holds in the last block, if more.

        backward begins           stored + what is saved outside the blocks + the loss
        it is in the last block   stored, that block whole + the gradients inside it
                                         + the gradient of the output layer (the loss is free)

    Raises ValueError for "selective" with a budget of adapters that `model` does not have yet.
    """
    blocks = decoder_blocks(model)
    _check(blocks, mode, every)
    if budget.dry is not None:
        return _checkpointed_one_by_one(budget, model, shape, mode=mode, every=every)
    kept = shape.tokens * _kept_bytes(budget, model, mode)
    checkpointed_blocks = len(range(0, len(blocks), every))
    plain_blocks = len(blocks) - checkpointed_blocks
    stored = checkpointed_blocks * kept + plain_blocks * budget.one_block

    as_backward_begins = stored + saved_outside_the_blocks(budget, model)
    last_is_checkpointed = (len(blocks) - 1) % every == 0
    if not last_is_checkpointed:  # it is free before any other block is recomputed
        return budget.change(activations=as_backward_begins)

    in_last_block = stored - kept + budget.one_block + budget.block_gradients
    head_gradient = 0
    if head_trains(budget, model):
        head_gradient = tensor_bytes(head_of(model))
    return budget.with_moment_in_a_block(
        as_backward_begins=as_backward_begins,
        in_a_block=in_last_block + head_gradient,
        # Where each gradient goes at once, only that of a tied one waits, for its second half.
        if_gradients_go=in_last_block + embedding_copies(model) // 2,
    )


def _checkpointed_one_by_one(
    budget: Budget, model: Any, shape: Shape, *, mode: str, every: int
) -> Budget:
    """The same where a dry step has counted each block by itself."""
    kept = [block.saved for block in budget.dry.blocks]
    for index in range(0, len(kept), every):
        keeps = shape.tokens * _kept_bytes(budget, model, mode, index=index)
        kept[index] = min(kept[index], keeps)
    dry = budget.dry.keeping(kept)
    return budget.change(activations=budget.activations - budget.dry.saved + dry.saved, dry=dry)


def _kept_bytes(budget: Budget, model: Any, mode: str, *, index: int = 0) -> int:
    """Bytes per token that one checkpointed block keeps: its input [D], and what `mode` adds."""
    elements = model.config.get_text_config().hidden_size
    if mode == "selective":
        require_adapters(budget, model)  # their matmuls are kept, too
        elements += _kept_outputs(model, index)
    return elements * model.dtype.itemsize


def _kept_outputs(model: Any, index: int) -> int:
    """Elements per token that the matmuls and the attention of one block return."""
    linear = 0
    for module in decoder_blocks(model)[index].modules():
        if is_linear(module):
            _, outputs = features(module)
            linear += outputs
    if model.config._attn_implementation == "eager":
        return linear
    query, _, _ = projection_widths(model.config)
    log_sum_exp = model.config.num_attention_heads  # one number per head, kept for the softmax
    return linear + query + log_sum_exp
