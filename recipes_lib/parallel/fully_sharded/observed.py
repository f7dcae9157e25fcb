"""What FSDP does, observed in one step on real ranks: dtypes, and the bytes it keeps and sends.

    dtypes = dtypes_of_step(model, optimizer, batch)        every rank calls both
    dtypes["weights at rest"]                               torch.float32
    dtypes["weights in a block"]                            torch.bfloat16

Autocast casts at each matrix product, and leaves the residual stream and the norms in fp32. Here a
block's parameters are rounded as they are gathered, norms among them, and so is what flows through.
Parts of the weights, gradients after they are summed, AdamW states, the loss and buffers stay fp32.

    row = measured_strategy(model, "hybrid", batch)         with a new model each
    row.weights, row.gradients, row.states                  bytes that this rank keeps
    row.weights_between                                     the same between forward and backward
    row.sent                                                bytes that this rank sends

Courses often show such a table without numbers. Two of its usual lines do not hold:

    "hybrid keeps a full copy on each GPU"   A copy is spread over a group of ranks, such as those
                                             of a machine.
    "gradients and states: parameters are    With `fully_shard` they are parts at rest, and whole
    replicated"                              from forward to backward. DDP's are always whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recipes_lib.core.checks import check_choice
from recipes_lib.core.model.causal_lm import decoder_blocks, norms_of
from recipes_lib.core.ranks import world_size
from recipes_lib.core.ranks.measured_bytes import rank_bytes
from recipes_lib.core.ranks.meshes import mesh_of
from recipes_lib.core.ranks.traffic import count_traffic
from recipes_lib.core.ranks.weighted_step import Batch, rank_step, sum_of_losses
from recipes_lib.parallel.fully_sharded import apply_fully_sharded

# --- dtypes ---------------------------------------------------------------------------------------


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

    def loss_sum_seen(model: Any, batch: Batch) -> torch.Tensor:
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
        rank_step(model, optimizer, [batch], loss_sum=loss_sum_seen)
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
        """Observe the dtype in which FSDP sums gradients."""
        if "reduce_scatter" in func.name():
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.dtype = tensors[0].dtype
        return func(*args, **(kwargs or {}))


# --- bytes of the four strategies -----------------------------------------------------------------

STRATEGIES = ("no shard", "gradients and states", "hybrid", "full")
COPIES = 2  # of the model, in the hybrid strategy


@dataclass(frozen=True)
class StrategyBytes:
    """What one rank keeps after a step of AdamW, and what it sends, in bytes."""

    weights: int
    gradients: int
    states: int
    weights_between: int
    sent: int


def measured_strategy(model: Any, strategy: str, batch: Batch) -> StrategyBytes:
    """Wrap `model`, a new one, by `strategy`, train a step on this rank's `batch`, and count.

    Every rank calls it. "no shard" is DistributedDataParallel; "hybrid" needs a number of ranks
    that is a multiple of COPIES.
    """
    check_choice(STRATEGIES, strategy=strategy)
    model = _wrapped_by_strategy(model, strategy)
    optimizer = torch.optim.AdamW(model.parameters())
    with count_traffic() as traffic:
        loss = sum_of_losses(model, batch)
        between = rank_bytes(model)
        loss.backward()
    optimizer.step()
    held = rank_bytes(model, optimizer)
    return StrategyBytes(
        weights=held.parameters,
        gradients=held.gradients,
        states=held.states,
        weights_between=between.parameters + between.gathered,
        sent=traffic.sent,
    )


def _wrapped_by_strategy(model: Any, strategy: str) -> Any:
    """The model under DDP, or sharded in one of three ways."""
    if strategy == "no shard":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    if strategy == "gradients and states":
        return apply_fully_sharded(model, reshard_after_forward=False)
    if strategy == "hybrid":
        mesh = mesh_of(copies=COPIES, parts=world_size() // COPIES)
        return apply_fully_sharded(model, mesh=mesh)
    return apply_fully_sharded(model)
