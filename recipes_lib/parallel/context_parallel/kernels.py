"""Attention of some queries to some keys with its log-sum-exp, by PyTorch's own kernels.

`scaled_dot_product_attention` keeps the log-sum-exp for itself. The operators below it return it,
and their backward takes that of *all* keys. So each block of a ring gets its exact gradients.
There is one for CPUs, and one for GPUs from Ampere on, in 16 bits.

Shapes: B batch, H heads, KV key and value heads, Q queries, K keys, E head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """out [B, H, Q, E], log-sum-exp [B, H, Q] in fp32 or more, and what the backward wants beside.

    q [B, H, Q, E], k and v [B, KV, K, E]; heads of keys are shared, not repeated.
    """
    operators = torch.ops.aten
    if q.device.type != "cuda":
        out, sums = operators._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
        return out, sums, ()
    out, sums, cum_q, cum_k, _, _, seed, offset, _ = operators._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, scale=scale
    )
    return out, sums, (cum_q, cum_k, seed, offset)


def attend_backward(
    gradient: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    sums: Tensor,
    rest: tuple[Any, ...],
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. `out` and `sums` are those over all keys, not over these alone.

    `rest` is what any `attend` of this device has returned: without dropout it says nothing about
    the block.
    """
    q, k, v = qkv
    operators = torch.ops.aten
    if q.device.type != "cuda":
        return operators._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, sums.contiguous(), 0.0, causal, scale=scale
        )
    cum_q, cum_k, *random = rest
    lengths = (cum_q, cum_k, q.shape[2], k.shape[2])
    return operators._scaled_dot_product_flash_attention_backward(
        gradient, q, k, v, out, sums.contiguous(), *lengths, 0.0, causal, *random, scale=scale
    )
