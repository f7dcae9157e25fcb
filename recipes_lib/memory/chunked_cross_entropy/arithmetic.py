"""How a chunked loss is computed: the rows of a chunk, the dtype of each product; and its bytes."""

from __future__ import annotations

from typing import Any

import torch

from recipes_lib.core.checks import check_whole
from recipes_lib.core.measure.dry_run import pretends_a_card
from recipes_lib.core.model.causal_lm import final_softcap
from recipes_lib.core.model.chunked_loss import (
    ChunkPlan,
    device_type,
    dtype_of_products,
    hidden_bytes,
    last_block_bytes,
    planned_autocast,
    planned_targets,
    rows_of_a_chunk,
)
from recipes_lib.core.predict.budget import Budget, Order, Shape, estimate
from recipes_lib.core.predict.plain_step import head_of, head_trains

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


# --- the arithmetic -------------------------------------------------------------------------------


@estimate(Order.LOSS)
def estimate_chunked_cross_entropy(
    budget: Budget,
    model: Any,
    shape: Shape,
    *,
    chunk_size: int | None = None,
    targets: int | None = None,
    dtype: torch.dtype | None = None,
) -> Budget:
    """The budget with a chunked loss.

    Args:
        targets: tokens of a micro-batch that have a label. None: all but the first of each row.
        dtype: of autocast, as in `estimate_mixed_precision`; None if this is called inside of it,
            or if there is none.
    Raises ValueError for a wrong chunk size, and if no token has a label.
    """
    if chunk_size is not None:
        check_whole(chunk_size=chunk_size)
    targets = planned_targets(shape, targets)
    head = head_of(model)
    with planned_autocast(head, dtype):
        plan = plan_chunks(head, head, targets=targets, chunk_size=chunk_size)
        spared = _spared_copy(budget, head)

    weight_gradient = 0
    if head_trains(budget, model):
        weight_gradient = head.numel() * plan.weight_sums.itemsize
    in_last_chunk = hidden_bytes(budget, model, shape) + _chunk_bytes(budget, model, plan, targets)
    in_last_block = last_block_bytes(budget, model, shape)
    return budget.change(
        activations=budget.activations - spared,
        loss=weight_gradient + max(in_last_chunk, in_last_block),
    )


def _spared_copy(budget: Budget, head: torch.Tensor) -> int:
    """Bytes of the 16-bit copy of the output layer that autocast would keep until backward.

    `estimate_mixed_precision` has counted it among the activations. The chunked loss keeps none.
    """
    counted = any(done.name == "estimate_mixed_precision" for done in budget.applied)
    casts = torch.is_autocast_enabled(device_type(head)) and head.dtype == torch.float32
    return 2 * head.numel() if counted and casts else 0


def _chunk_bytes(budget: Budget, model: Any, plan: ChunkPlan, targets: int) -> int:
    """What is alive at the largest moment of one chunk, beside the gradients."""
    head = head_of(model)
    vocabulary, width = head.shape
    rows = min(plan.rows, targets)
    size = plan.products.itemsize

    logits = rows * vocabulary * size
    # Of this chunk; and beside them their gradient, or those of the chunk before.
    inputs = 2 * rows * width * size
    weight_copy = 0
    if plan.products != head.dtype:
        weight_copy = head.numel() * size
    between_products = _block_bytes(model, plan, rows)
    in_products = _sum_bytes(budget, model, plan)
    return logits + inputs + weight_copy + max(between_products, in_products)


def _block_bytes(model: Any, plan: ChunkPlan, rows: int) -> int:
    """Between the products: the fp32 log-softmax of a block, and the logits in fp32 beside it.

    That copy of the logits exists where they are capped, or have 16 bits.
    """
    block = 4 * min(rows * len(head_of(model)), LOGITS_OF_A_BLOCK)
    if final_softcap(model) or plan.products.itemsize == 2:
        return 2 * block
    return block


def _sum_bytes(budget: Budget, model: Any, plan: ChunkPlan) -> int:
    """In the products: the chunk's part of the weight's gradient, before a sum in another dtype."""
    if not head_trains(budget, model) or plan.products == plan.weight_sums:
        return 0
    return head_of(model).numel() * plan.products.itemsize
