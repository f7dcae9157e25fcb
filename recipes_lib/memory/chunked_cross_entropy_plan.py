"""How a chunked loss is computed: the rows of a chunk, and the dtype of each product and sum.

Part of chunked_cross_entropy: the loss runs by this plan, and the estimate counts its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from recipes_lib.core.machine import machine

# The most logits of a chunk. Larger chunks are hardly faster: the products are large enough.
CHUNK_BYTES = 2**26  # 64 MiB
CHUNK_BYTES_ON_GPU = 2**27

# Kernels count the elements of a tensor in 32 bits.
MOST_ELEMENTS = 2**31 - 1

# Between the products a chunk is worked on in fp32, and for that in blocks of so many logits: only
# a block has an fp32 copy.
LOGITS_OF_A_BLOCK = 2**22

# Under autocast a product of 16 bits begins with a copy of the weight. For so few rows a CPU
# multiplies in fp32 in about the time that the copy takes.
FEW_TARGETS = 128

# Each addition in bf16 rounds. A sum of this many chunks is off by 0.5 %; in fp32 it is off by
# 0.25 %, because the bf16 products in it are rounded anyway.
MOST_CHUNKS_SUMMED_IN_BF16 = 16


@dataclass(frozen=True)
class ChunkPlan:
    """How many rows of logits exist at a time, and the dtypes to compute in."""

    rows: int  # C
    block_rows: int  # of a chunk that are worked on at a time between its products
    products: torch.dtype  # of the logits and of all matrix products
    sums: torch.dtype  # of the loss, and of everything between the products
    weight_sums: torch.dtype  # of the gradient of the weight, while chunks are added to it


def plan_chunks(
    hidden: torch.Tensor, weight: torch.Tensor, *, targets: int, chunk_size: int | None
) -> ChunkPlan:
    """The plan for `targets` rows of `hidden` [..., D] and the `weight` [V, D]."""
    device = hidden.device.type
    if hidden.is_meta:
        device = machine().device  # a meta model is planned for this machine
    wanted = _wanted_dtype(hidden, weight, device)
    sums = torch.promote_types(wanted, torch.float32)

    products = wanted
    if device == "cpu" and not _has_units_for(wanted):
        products = sums  # emulated 16-bit products take tens of times as long
    few = targets <= FEW_TARGETS and wanted.itemsize == 2
    if device == "cpu" and few and weight.dtype == torch.float32:
        products = torch.float32  # without a copy of the weight

    rows = _rows_of_a_chunk(len(weight), products, device, chunk_size)
    block_rows = max(1, LOGITS_OF_A_BLOCK // len(weight))

    weight_sums = sums
    few_chunks = targets <= MOST_CHUNKS_SUMMED_IN_BF16 * rows
    if few_chunks and weight.dtype == products == torch.bfloat16:
        weight_sums = products
    return ChunkPlan(rows, block_rows, products, sums, weight_sums)


def _wanted_dtype(hidden: torch.Tensor, weight: torch.Tensor, device: str) -> torch.dtype:
    """The dtype that a plain linear layer would compute in."""
    dtype = torch.result_type(hidden, weight)
    if torch.is_autocast_enabled(device) and dtype != torch.float64:  # which autocast leaves alone
        return torch.get_autocast_dtype(device)
    return dtype


def _has_units_for(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies in `dtype` itself. No CPU here does in fp16, some do in bf16."""
    if dtype == torch.bfloat16:
        return machine().native_bf16
    return dtype.itemsize >= 4


def _rows_of_a_chunk(
    vocabulary: int, products: torch.dtype, device: str, chunk_size: int | None
) -> int:
    """C: `chunk_size`, or as many rows as fit into CHUNK_BYTES, in multiples of 64."""
    rows = chunk_size
    if rows is None:
        most_bytes = CHUNK_BYTES_ON_GPU
        if device == "cpu":
            most_bytes = CHUNK_BYTES
        fitting = most_bytes // (vocabulary * products.itemsize)
        rows = max(64, fitting // 64 * 64)
    return min(rows, MOST_ELEMENTS // vocabulary)
