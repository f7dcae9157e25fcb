"""How a chunked loss is computed: the rows of a chunk, and the dtype of each product."""

from __future__ import annotations

import torch

from recipes_lib.core.measure.dry_run import pretends_a_card
from recipes_lib.core.model.chunked_loss import (
    ChunkPlan,
    device_type,
    dtype_of_products,
    rows_of_a_chunk,
)

# The most logits of a chunk. Larger chunks are hardly faster: the products are large enough.
CHUNK_BYTES = 2**26  # 64 MiB
CHUNK_BYTES_ON_GPU = 2**27

# Between the products, a chunk is worked on in blocks of so many logits.
LOGITS_OF_A_BLOCK = 2**22

# Under autocast a product of 16 bits begins with a copy of the weight. For so few rows a CPU
# multiplies in fp32 in about the time that the copy takes.
FEW_TARGETS = 128

# Each addition in bf16 rounds. A sum of this many chunks is off by 0.5 %; in fp32 it is off by
# 0.25 %, because the bf16 products in it are rounded anyway.
MOST_CHUNKS_SUMMED_IN_BF16 = 16


def plan_chunks(
    hidden: torch.Tensor, weight: torch.Tensor, *, targets: int, chunk_size: int | None
) -> ChunkPlan:
    """The plan for `targets` rows of `hidden` [..., D] and the `weight` [V, D]."""
    device = device_type(hidden)
    products = dtype_of_products(hidden, weight, device)
    on_a_cpu = device == "cpu" and not pretends_a_card()
    few = targets <= FEW_TARGETS and products.itemsize == 2
    if on_a_cpu and few and weight.dtype == torch.float32:
        products = torch.float32  # without a copy of the weight
    sums = torch.promote_types(products, torch.float32)

    most_bytes = CHUNK_BYTES_ON_GPU
    if on_a_cpu:
        most_bytes = CHUNK_BYTES
    rows = rows_of_a_chunk(len(weight), products, chunk_size=chunk_size, most_bytes=most_bytes)

    weight_sums = sums
    few_chunks = targets <= MOST_CHUNKS_SUMMED_IN_BF16 * rows
    if few_chunks and weight.dtype == products == torch.bfloat16:
        weight_sums = products
    return ChunkPlan(
        rows=rows,
        block_rows=max(1, LOGITS_OF_A_BLOCK // len(weight)),
        products=products,
        sums=sums,
        weight_sums=weight_sums,
    )
