"""Fully sharded data parallel (FSDP2, ZeRO-3): each rank keeps one N-th of everything.

Problem    Under DDP every rank holds all weights, gradients and AdamW states: 16 bytes per
           parameter in fp32, N times the same.
Idea       A rank keeps a part of each parameter. A block is put together when it computes, and
           taken apart again:

               rank 0  [W0]  --all-gather-->  [W0 W1]  forward, or backward
               rank 1  [W1]  --all-gather-->  [W0 W1]  forward, or backward
                                              [G0 G1]  --reduce-scatter-->  [G0] rank 0, [G1] rank 1

           AdamW then works on the parts, and nobody ever needs the whole.
Saves      Of 16 bytes per parameter P, a rank holds 16 P / N, and one block as a whole beside it.
           While backward is in that block there are up to four copies of it: gathered, the next
           one arriving, its gradients, and those on their way.
Costs      Weights cross the network twice and gradients once per micro-batch: half as much again as
           DDP. The next block is fetched while this one computes, so a slow network is what shows.
Use when   Weights, gradients and states do not fit beside each other on one device.
Not when   They fit: DDP sends less. Or micro-batches are so small that a block computes faster than
           the next one arrives.
In production   `fully_shard` itself (torchtitan); `accelerate launch` with `fsdp_version: 2`;
           `TrainingArguments(fsdp=…)`, where accelerate on CPUs silently gives DDP instead.
Source     Zhao et al., "PyTorch FSDP" (arXiv 2304.11277); Rajbhandari et al., "ZeRO" (arXiv
           1910.02054); PyTorch, torch.distributed.fsdp.fully_shard; compiling: pull request
           4022 of Hugging Face accelerate.

With a mesh of two dimensions (HSDP), parts are spread over the second one, such as the GPUs of a
machine, and copied along the first. Weights then stay inside of a machine, and of the gradients
only the parts cross to the others.

A model is sharded in groups, each of which is gathered at once: every block; the embedding and the
output layer, if they do not share their weight; and what is left, with the model itself.

The order of recipes: adapters, then checkpoints and compiled blocks, then this, then the optimizer.

compile  compile and shard in both orders, timed in turns
precision  what stays in fp32 when a sharded model computes in bf16
strategies  the four sharding strategies, measured on real ranks
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from recipes_lib.core.checks import check_flag, check_whole
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.core.predict.budget import Budget, Order, Shape, estimate
from recipes_lib.core.ranks import group_device, rank, require_group
from recipes_lib.core.ranks.agreement import same_error_on_all_ranks
from recipes_lib.core.ranks.collectives import all_gather, reduce_scatter
from recipes_lib.core.ranks.meshes import default_mesh
from recipes_lib.core.ranks.shard_groups import (
    agree_to_shard,
    is_sharded,
    require_same_weights,
    require_shardable,
    shard_in_groups,
)
from recipes_lib.parallel._shard_budget import computing_in, sharded_budget
from recipes_lib.parallel._shard_group_bytes import sharded_groups

# --- the idea: what a learner can copy ------------------------------------------------------------


def linear_of_shards(x: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """x [rows, in] times a weight [out, in], of which each rank has the rows `shard` [out/N, in].

    Backward leaves in `shard.grad` the mean of the ranks' gradients, as DDP would: its part of it.
    """
    return _GatheredLinear.apply(x, shard)


class _GatheredLinear(torch.autograd.Function):
    """Gather, use, forget; in backward gather again, and scatter what was summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, shard)  # and not the whole weight
        return x @ _gather(shard).T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, shard = ctx.saved_tensors
        to_input = gradient @ _gather(shard)
        whole = gradient.T @ x  # [out, in], from the rows of this rank
        part = torch.empty_like(shard)
        reduce_scatter(part, whole)
        return to_input, part / distributed.get_world_size()


def _gather(shard: torch.Tensor) -> torch.Tensor:
    """The whole weight [out, in] of the parts [out/N, in] of all ranks."""
    rows, inputs = shard.shape
    whole = shard.new_empty(rows * distributed.get_world_size(), inputs)
    all_gather(whole, shard.detach().contiguous())
    return whole


# --- the technique --------------------------------------------------------------------------------


def apply_fully_sharded(
    model: Any,
    *,
    mesh: DeviceMesh | None = None,
    parameter_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    offload: bool = False,
    compile_blocks: bool = False,
    prefetch: int = 1,
) -> Any:
    """Shard the parameters of `model` over the ranks, in place. Returns `model`.

    Every rank calls it, with the same weights, before the optimizer is made. A step is
    `core.rank_step.rank_step`, or a loop as in one process: gradients are means over the ranks.
    Parameters are DTensors afterwards; `parameter.full_tensor()` puts one together.

    Args:
        mesh: of one dimension; or of two, copies along the first and parts along the second. By
            default all ranks share one copy.
        parameter_dtype: in which blocks are gathered and compute; the parts stay as they are, and
            so do gradients and states. None computes in the dtype of the parts.
        reduce_dtype: in which gradients are summed over the ranks; by default fp32 if
            `parameter_dtype` is bf16.
        reshard_after_forward: take a block apart again after its forward. False keeps all blocks
            whole until backward, as ZeRO-2 does, and sends a third less.
        offload: keep parts, gradients and states in host memory, where the optimizer then works.
        compile_blocks: compile each block before it is sharded, as torchtitan does. Compiled
            afterwards, the hooks that gather weights would break its graph.
        prefetch: how many blocks are fetched ahead. With 1, PyTorch chooses when.

    Raises ValueError on every rank: without a process group; if the ranks disagree about arguments,
    shapes or weights; for a model that is no causal LM, is sharded already, has weights in 4 bits,
    trains weights of several dtypes in one block, or has an optimizer that steps in backward; for
    fp16, and for numbers out of range.
    """
    options = {
        "mesh": mesh,
        "parameter_dtype": parameter_dtype,
        "reduce_dtype": reduce_dtype,
        "reshard_after_forward": reshard_after_forward,
        "offload": offload,
        "prefetch": prefetch,
    }
    # First of all, so that no rank waits for one that has raised.
    agree_to_shard(model, compile_blocks=compile_blocks, **options)
    check_flag(reshard_after_forward=reshard_after_forward, offload=offload)
    check_flag(compile_blocks=compile_blocks)
    require_shardable(
        model, parameter_dtype=parameter_dtype, reduce_dtype=reduce_dtype, prefetch=prefetch
    )
    _require_no_four_bits(model)
    require_same_weights(model)
    if mesh is None:
        options["mesh"] = default_mesh()
    if compile_blocks:
        for block in decoder_blocks(model):
            block.compile()
    shard_in_groups(model, **options)
    _watch_for_late_compiling(model)
    return model


# --- weights from one rank ------------------------------------------------------------------------


def load_from_first_rank(model: Any, whole: Any | None) -> Any:
    """Fill a model that was sharded on the meta device with the weights of one whole model.

    Only rank 0 needs the memory of a whole model: the others build theirs under
    `torch.device("meta")`, shard it, and get their parts here. Returns `model`.

    Args:
        model: the sharded one, on every rank; without `offload` if it is on GPUs.
        whole: on rank 0 the model with the weights, and None on all others.

    Raises ValueError on every rank if rank 0 gives no model, for one that is not sharded, and if
    weights or buffers of the two have other names or shapes.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    require_group()
    with same_error_on_all_ranks():
        _require_source_and_target(model, whole)
    state = {}
    shapes = {}
    buffers = {}
    if rank() == 0:
        state = whole.state_dict()
        shapes = _shapes(whole)
        # From the host: a tensor of GPU 0 would arrive on GPU 0 on all ranks.
        buffers = {name: buffer.cpu() for name, buffer in whole.named_buffers()}
    told = [shapes, buffers]
    distributed.broadcast_object_list(told, src=0)
    shapes, buffers = told
    with same_error_on_all_ranks():
        _require_same_shapes(_shapes(model), shapes)
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device=group_device())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    # A buffer that is in no state dict, as the frequencies of RoPE, would stay as the memory is.
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    return model


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Whole shapes of all weights and buffers by name, those that are in no state dict included."""
    tensors = model.state_dict() | dict(model.named_buffers())
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


# --- Hugging Face glue and guards -----------------------------------------------------------------


def _require_source_and_target(model: Any, whole: Any | None) -> None:
    if not is_sharded(model):
        raise ValueError("this model is not sharded: call apply_fully_sharded first")
    if rank() == 0 and whole is None:
        raise ValueError("whole=None on rank 0: give it the model whose weights all ranks need")


def _require_same_shapes(
    here: dict[str, tuple[int, ...]], there: dict[str, tuple[int, ...]]
) -> None:
    odd = sorted(name for name in here | there if here.get(name) != there.get(name))
    if odd:
        name = odd[0]
        raise ValueError(
            f"{name} is {here.get(name)} in the sharded model and {there.get(name)} in the whole "
            f"one ({len(odd)} differ): build both from one configuration"
        )


def _require_no_four_bits(model: Any) -> None:
    if any(hasattr(parameter, "quant_state") for parameter in model.parameters()):
        raise ValueError(
            "this model has weights in 4 bits, whose scales would stay whole on every rank: use "
            "apply_quantized_shards"
        )


def _watch_for_late_compiling(model: Any) -> None:
    """Let the forward of `model` raise ValueError if a block was compiled after it was sharded."""
    blocks = decoder_blocks(model)
    compiled = [block._compiled_call_impl for block in blocks]

    def refuse(*_: Any) -> None:
        now = [block._compiled_call_impl for block in blocks]
        if now != compiled:
            raise ValueError(
                "a block was compiled after it was sharded, and so were the hooks that gather its "
                "weights: pass compile_blocks=True to apply_fully_sharded, or compile the blocks "
                "before it"
            )

    model.register_forward_pre_hook(refuse)


# --- the arithmetic -------------------------------------------------------------------------------


@estimate(Order.SHARDING)
def estimate_fully_sharded(
    budget: Budget,
    model: Any,
    shape: Shape,
    *,
    parameter_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    offload: bool = False,
    prefetch: int = 1,
    copies: int = 1,
) -> Budget:
    """The budget of one of `shape.ranks` ranks, with AdamW. Options as in `apply_fully_sharded`.

    With `offload` it is that of the device; the parts are on the host.

    Args:
        copies: how many copies of the model the ranks hold, with a mesh of two dimensions.

    Raises ValueError for ranks that `copies` does not divide, and for a `parameter_dtype` after
    recipes that have changed the activations: they count in the dtype of `model`.
    """
    check_flag(reshard_after_forward=reshard_after_forward, offload=offload)
    check_whole(prefetch=prefetch)
    groups = sharded_groups(
        model,
        shards=_ranks_of_a_copy(shape.ranks, copies),
        parameter_dtype=parameter_dtype,
        reduce_dtype=reduce_dtype,
    )
    return sharded_budget(
        computing_in(budget, model, shape, parameter_dtype),
        model,
        shape,
        groups,
        reshard_after_forward=reshard_after_forward,
        offload=offload,
        prefetch=prefetch,
    )


def predicted_sent_bytes(
    model: Any,
    *,
    ranks: int,
    copies: int = 1,
    micro_batches: int = 1,
    parameter_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
) -> int:
    """Bytes that one rank sends in a step, each collective as a ring; a forward alone sends less.

    A ring of N ranks sends (N - 1) / N of a group to gather it, and as much to scatter its
    gradients. Over copies the parts of the gradients are added up as DDP does.

    Args:
        copies: how many copies of the model the ranks hold, with a mesh of two dimensions.
        micro_batches: of a step, each of which averages its gradients.

    Raises ValueError for numbers below 1, and for ranks that `copies` does not divide.
    """
    check_flag(reshard_after_forward=reshard_after_forward)
    check_whole(ranks=ranks, micro_batches=micro_batches)
    shards = _ranks_of_a_copy(ranks, copies)
    groups = sharded_groups(
        model, shards=shards, parameter_dtype=parameter_dtype, reduce_dtype=reduce_dtype
    )
    gathered = groups.whole.gathered
    if reshard_after_forward:  # then backward gathers the blocks once more
        gathered += groups.all_blocks.gathered
    scattered = groups.whole.sent
    in_a_copy = (gathered + scattered) * (shards - 1) // shards
    between_copies = 2 * (scattered // shards) * (copies - 1) // copies
    return micro_batches * (in_a_copy + between_copies)


def _ranks_of_a_copy(ranks: int, copies: int) -> int:
    check_whole(copies=copies)
    if ranks % copies:
        raise ValueError(f"copies={copies}: give a divisor of the {ranks} ranks")
    return ranks // copies
