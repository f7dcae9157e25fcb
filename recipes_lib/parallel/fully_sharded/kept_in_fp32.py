"""What stays in fp32 when a sharded model computes in bf16, observed in one step.

    dtypes = dtypes_of_step(model, optimizer, batch)
    dtypes["weights at rest"]           torch.float32
    dtypes["weights in a block"]        torch.bfloat16

Autocast casts at each matrix product, and leaves the residual stream and the norms in fp32. Here a
block's parameters are rounded as they are gathered, norms among them, and so is what flows through:

    fp32   parts of the weights, gradients after they are summed, AdamW states, the loss, buffers
    bf16   gathered weights, the residual stream, gradients as backward makes them
    fp32   the sum of the gradients over the ranks, if `reduce_dtype` says so
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recipes_lib.core.model.causal_lm import decoder_blocks, norms_of
from recipes_lib.core.ranks.rank_step import Batch, rank_step, sum_of_losses


def dtypes_of_step(
    model: Any, optimizer: torch.optim.Optimizer, batch: Batch
) -> dict[str, torch.dtype]:
    """Train one step on `batch` [B, S] of a sharded model, and tell the dtype of all it is of."""
    block = decoder_blocks(model)[0]
    linear = next(module for module in block.modules() if isinstance(module, nn.Linear))
    weight = next(model.parameters())
    found = {"weights at rest": weight.dtype}

    def look_inside(*_: Any) -> None:
        found["weights in a block"] = linear.weight.dtype
        found["norms in a block"] = norms_of(block)[0].weight.dtype
        linear.weight.register_hook(look_at_gradient)

    def look_at_gradient(gradient: torch.Tensor) -> None:
        found["gradients as they are made"] = gradient.dtype

    def look_behind(_: Any, __: Any, output: Any) -> None:
        found["residual stream"] = tree_leaves(output)[0].dtype

    def look_at_logits(_: Any, __: Any, output: Any) -> None:
        found["logits"] = output.logits.dtype

    def look_at_gradient_part(parameter: nn.Parameter) -> None:
        found["gradients at rest"] = parameter.grad.dtype

    def loss_sum(model: Any, batch: Batch) -> torch.Tensor:
        loss = sum_of_losses(model, batch)
        found["loss"] = loss.dtype
        return loss

    handles = [
        linear.register_forward_pre_hook(look_inside),
        block.register_forward_hook(look_behind),
        model.register_forward_hook(look_at_logits),
        weight.register_post_accumulate_grad_hook(look_at_gradient_part),
    ]
    with _SumsSeen() as sums:
        rank_step(model, optimizer, [batch], loss_sum=loss_sum)
    for handle in handles:
        handle.remove()
    found["gradients as they are summed"] = sums.dtype
    found["states"] = optimizer.state[weight]["exp_avg"].dtype
    for name, buffer in model.named_buffers():
        if "inv_freq" in name:
            found["frequencies of RoPE"] = buffer.dtype
    return found


class _SumsSeen(TorchDispatchMode):
    """The dtype of the tensors that are reduced over ranks."""

    dtype: torch.dtype | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "reduce_scatter" in func.name():
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.dtype = tensors[0].dtype
        return func(*args, **(kwargs or {}))
