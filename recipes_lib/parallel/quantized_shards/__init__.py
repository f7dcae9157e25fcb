"""FSDP with QLoRA: the frozen 4-bit base is sharded, parameter by parameter, scales included.

Problem    A model of 70 billion weights takes 36 GB in 4 bits: too much for a card of 24 GB. Each
           of two cards would need the whole of it for QLoRA alone.
Idea       Codes and scales are parameters of whole numbers, of which each rank keeps a part. A
           block is gathered in 4 bits, and one layer at a time becomes 16-bit weights:

               rank 0  [codes 0, scales 0]  --all-gather-->  [codes, scales]  -->  W  -->  x W^T
               rank 1  [codes 1, scales 1]  --all-gather-->  a block, 4 bits       a layer, 16 bits

           Adapters are sharded like any parameter. Only they have gradients to exchange.
Saves      Of 0.516 bytes per weight of the blocks, a rank holds one N-th. On the way a block takes
           a quarter of what it would in bf16, so ranks also send a quarter.
Costs      Each layer is dequantized in forward and again in backward. Every rank quantizes the
           whole model once, layer by layer, and needs host memory for all of it in 4 bits.
Use when   The 4-bit base does not fit one device, or leaves it no room for a batch.
Not when   It fits: QLoRA under DDP sends adapters and nothing else.
In production   `accelerate launch` with FSDP and `BitsAndBytesConfig(bnb_4bit_quant_storage=
           torch.bfloat16)`, as in Axolotl's `qlora-fsdp` examples: codes are sharded there, and
           scales stay whole. torchao's `NF4Tensor` shards both, where rows divide.
Source     Answer.AI, "You can now train a 70b language model at home" and its benchmarks (March
           2024); Dettmers et al., "QLoRA" (arXiv 2305.14314).

The order of recipes: QLoRA, checkpoints, this, the optimizer.

dry_run  the memory of one rank for a model of any size, without a GPU
ends  a frozen embedding and output layer, gathered a few rows at a time
layer  a 4-bit linear layer whose codes and scales are parameters
libraries  what bitsandbytes and torchao shard of a 4-bit layer, and what not
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from recipes_lib.core.checks import check_choice, check_flag, check_whole
from recipes_lib.core.predict.budget import Budget, Order, Shape, estimate
from recipes_lib.core.ranks.collectives import all_gather
from recipes_lib.core.ranks.meshes import default_mesh
from recipes_lib.core.ranks.shard_groups import (
    DTYPES,
    agree_to_shard,
    require_same_weights,
    require_shardable,
    shard_in_groups,
)
from recipes_lib.parallel._shard_budget import sharded_budget
from recipes_lib.parallel._shard_group_bytes import sharded_groups
from recipes_lib.parallel.quantized_shards.ends import cut_ends, ends_can_be_cut
from recipes_lib.parallel.quantized_shards.layer import PackedLinear, packed

# --- the idea: what a learner can copy ------------------------------------------------------------


def weight_of_shards(
    codes: torch.Tensor, scales: torch.Tensor, levels: torch.Tensor
) -> torch.Tensor:
    """A weight [O, I] of the rows that each rank has: uint8 `codes` [O/N, I/2], fp32 `scales`.

    `scales` [O/N, I/64] are not quantized here. `levels` [16] are those of NF4.
    """
    codes = _gather(codes)  # [O, I/2]: half a byte per weight crosses the network
    scales = _gather(scales)  # [O, I/64]
    first = codes >> 4
    second = codes & 15
    index = torch.stack([first, second], dim=-1).flatten(1)  # [O, I], two indices from each byte
    in_blocks = levels[index.long()].unflatten(1, (scales.shape[1], -1))  # [O, I/64, 64]
    return (in_blocks * scales[..., None]).flatten(1)


def _gather(part: torch.Tensor) -> torch.Tensor:
    rows, columns = part.shape
    whole = part.new_empty(rows * distributed.get_world_size(), columns)
    all_gather(whole, part)
    return whole


# --- the technique --------------------------------------------------------------------------------


def apply_quantized_shards(
    model: Any,
    *,
    mesh: DeviceMesh | None = None,
    adapter_dtype: torch.dtype | None = None,
    parameter_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    offload: bool = False,
    prefetch: int = 1,
    cut_vocabulary: bool = True,
) -> Any:
    """Shard a model that `apply_qlora` returned, in place, its 4-bit weights too. Returns `model`.

    Every rank calls it, with the same base and the same adapters, before the optimizer is made.
    Seed the ranks alike before adapters are drawn. A step is `core.rank_step.rank_step`.

    Args:
        mesh: of one dimension; or of two, copies along the first and parts along the second. By
            default all ranks share one copy.
        adapter_dtype: store adapters in bf16, as well as their gradients and states. None leaves
            them as they are: peft makes them fp32.
        parameter_dtype: in which adapters, norms, embedding and output layer are gathered and
            compute. The codes of the base are whole numbers and stay as they are.
        reduce_dtype: in which gradients are summed; by default fp32 if `parameter_dtype` is bf16.
        reshard_after_forward: take a block apart again after its forward.
        offload: keep all parts in host memory, and the adapters' gradients and states.
        prefetch: how many blocks are fetched ahead. With 1, PyTorch chooses when.
        cut_vocabulary: gather a frozen embedding and output layer a few rows at a time, and never
            as a whole, which would take twice their size. False gathers them as PyTorch does.

    Raises ValueError on every rank: without a process group; if the ranks disagree; for a model
    that is no causal LM, has no 4-bit layers or no adapters, is sharded already, or trains several
    dtypes in one block; for layers that `quantized_shards_layer.packed` refuses; and for numbers
    out of range.
    """
    # First of all, so that no rank waits for one that has raised.
    agree_to_shard(
        model,
        mesh=mesh,
        adapter_dtype=adapter_dtype,
        parameter_dtype=parameter_dtype,
        reduce_dtype=reduce_dtype,
        reshard_after_forward=reshard_after_forward,
        offload=offload,
        prefetch=prefetch,
        cut_vocabulary=cut_vocabulary,
    )
    check_flag(reshard_after_forward=reshard_after_forward, offload=offload)
    check_flag(cut_vocabulary=cut_vocabulary)
    require_shardable(
        model, parameter_dtype=parameter_dtype, reduce_dtype=reduce_dtype, prefetch=prefetch
    )
    check_choice(DTYPES, adapter_dtype=adapter_dtype)
    _require_adapters(model)
    require_same_weights(model)
    pack_layers(model)
    if adapter_dtype is not None:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(adapter_dtype)
    if mesh is None:
        mesh = default_mesh()
    left_out: set[nn.Parameter] = set()
    if cut_vocabulary and ends_can_be_cut(model):
        left_out = cut_ends(model, mesh, parameter_dtype, offload)
    shard_in_groups(
        model,
        mesh=mesh,
        parameter_dtype=parameter_dtype,
        reduce_dtype=reduce_dtype,
        reshard_after_forward=reshard_after_forward,
        offload=offload,
        prefetch=prefetch,
        left_out=left_out,
    )
    return model


def pack_layers(model: Any) -> Any:
    """Make parameters of the codes and scales of all 4-bit layers, in place. Returns `model`.

    `apply_quantized_shards` calls it. Raises ValueError, before anything changes, for a layer that
    cannot be packed, and if there is none in 4 bits.
    """
    layers = {}
    already = False
    for name, module in model.named_modules():
        already = already or isinstance(module, PackedLinear)
        if type(module).__name__ == "Linear4bit" and hasattr(module, "compute_dtype"):
            layers[name] = packed(name, module)
    if not layers and not already:
        raise ValueError(
            "this model has no layer in 4 bits: give the model that apply_qlora returned, or use "
            "apply_fully_sharded"
        )
    for name, layer in layers.items():
        model.set_submodule(name, layer)
    return model


def whole_adapters(model: Any) -> dict[str, torch.Tensor]:
    """The parameters that train, by name, whole and on the CPU; every rank has to call it.

    `peft.set_peft_model_state_dict` and `core.safetensors` take them: no rank needs the base.
    """
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            value = parameter.detach()
            if isinstance(value, DTensor):
                value = value.full_tensor()
            found[name] = value.cpu()
    return found


# --- Hugging Face glue and guards -----------------------------------------------------------------


def _require_adapters(model: Any) -> None:
    if not hasattr(model, "peft_config"):
        raise ValueError(
            "this model has no adapters, and its 4-bit weights cannot train: give the model that "
            "apply_qlora returned"
        )


# --- the arithmetic -------------------------------------------------------------------------------


@estimate(Order.SHARDING)
def estimate_quantized_shards(
    budget: Budget,
    model: Any,
    shape: Shape,
    *,
    parameter_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    offload: bool = False,
    prefetch: int = 1,
    cut_vocabulary: bool = True,
) -> Budget:
    """The budget of one of `shape.ranks` ranks. Options as in `apply_quantized_shards`.

    With `offload` it is that of the device; the parts are on the host.

    Args:
        budget: of the QLoRA model in one process, its checkpoints included.
        model: after `pack_layers`, with its adapters in the dtype in which they are stored. It may
            be on the meta device.

    Raises ValueError for a model without packed layers.
    """
    check_flag(reshard_after_forward=reshard_after_forward, offload=offload)
    check_flag(cut_vocabulary=cut_vocabulary)
    check_whole(prefetch=prefetch)
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    if not layers:
        raise ValueError("no layer of this model is packed: call pack_layers first")
    groups = sharded_groups(
        model,
        shards=shape.ranks,
        parameter_dtype=parameter_dtype,
        reduce_dtype=reduce_dtype,
        cut_ends=cut_vocabulary and ends_can_be_cut(model),
    )
    return sharded_budget(
        budget,
        model,
        shape,
        groups,
        reshard_after_forward=reshard_after_forward,
        offload=offload,
        prefetch=prefetch,
        beside_a_block=max(_made_bytes(layer) for layer in layers),
    )


def _made_bytes(layer: PackedLinear) -> int:
    """Bytes of the weight that is made of codes and scales, with a copy to compute in."""
    made = layer.weight_dtype.itemsize
    if layer.compute_dtype not in (None, layer.weight_dtype):
        made += layer.compute_dtype.itemsize
    return layer.in_features * layer.out_features * made


def predicted_part_bytes(model: nn.Module, *, ranks: int) -> int:
    """Bytes of the parameters that one rank keeps of a packed model, rounded up for the first."""
    groups = sharded_groups(model, shards=ranks)
    return groups.whole.part
