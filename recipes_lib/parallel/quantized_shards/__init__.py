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

predicted_rank  the memory of one rank for a model of any size, without a GPU
cut_vocabulary  a frozen embedding and output layer, gathered a few rows at a time
nf4_linear  a 4-bit linear layer whose codes and scales are parameters
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from recipes_lib.core.checks import check_choice
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.core.ranks.agreement import agree
from recipes_lib.core.ranks.collectives import all_gather
from recipes_lib.core.ranks.meshes import default_mesh
from recipes_lib.parallel._sharding import (
    DTYPES,
    require_new_on_ranks,
    require_same_weights,
    shard_ends,
    sharding_options,
)
from recipes_lib.parallel.quantized_shards.cut_vocabulary import cut_ends, ends_can_be_cut
from recipes_lib.parallel.quantized_shards.nf4_linear import pack_layers

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
    offload: bool = False,
    cut_vocabulary: bool = True,
) -> Any:
    """Shard a model that `apply_qlora` returned, in place, its 4-bit weights too. Returns `model`.

    Every rank calls it, with the same base and the same adapters, before the optimizer is made.
    Seed the ranks alike before adapters are drawn. A step is `core.ranks.weighted_step.rank_step`.

    Args:
        mesh: as in `apply_fully_sharded`.
        adapter_dtype: store adapters in bf16, as well as their gradients and states. None leaves
            them as they are: peft makes them fp32.
        offload: keep all parts in host memory.
        cut_vocabulary: gather a frozen embedding and output layer a few rows at a time, and never
            as a whole, which would take twice their size.
    """
    # First of all, so that no rank waits for one that has raised.
    switches = (adapter_dtype, offload, cut_vocabulary)
    agree(model=model, mesh=mesh, options=switches)
    check_choice(DTYPES, adapter_dtype=adapter_dtype)
    require_new_on_ranks(model)
    require_same_weights(model)
    if mesh is None:
        mesh = default_mesh()
    options = sharding_options(mesh, None, None, offload)
    pack_layers(model)
    if adapter_dtype is not None:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(adapter_dtype)

    # Each call makes a group, which is gathered and taken apart as one: those inside first.
    for block in decoder_blocks(model):
        fully_shard(block, **options)
    left_out: set[nn.Parameter] = set()
    if cut_vocabulary and ends_can_be_cut(model):
        left_out = cut_ends(model, mesh, offload)
    else:
        shard_ends(model, reshard_after_forward=True, **options)
    fully_shard(model, ignored_params=left_out, **options)
    return model
