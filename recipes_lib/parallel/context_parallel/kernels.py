"""Attention of some queries to some keys with its log-sum-exp, by PyTorch's own kernels.

`scaled_dot_product_attention` keeps the log-sum-exp for itself. The operators below it return it,
and their backward takes that of *all* keys. So each block of a ring gets its exact gradients.

    device and dtype                          operator
    CPU                                       flash attention for CPUs
    GPU from Ampere on, in 16 bits            flash attention
    any other GPU, and fp32                   memory-efficient attention: it wants all heads of
                                              keys, so shared ones are repeated for the call

Shapes: B batch, H heads, KV key and value heads, Q queries, K keys, E head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

FLASH_DTYPES = (torch.float16, torch.bfloat16)
AMPERE = (8, 0)  # the first capability with flash attention and with products in bf16
# The memory-efficient kernels read the log-sum-exp of so many queries at a time.
QUERIES_TOGETHER = 32


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
    if _flash_runs(q):
        out, sums, cum_q, cum_k, _, _, seed, offset, _ = (
            operators._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
        )
        return out, sums, (cum_q, cum_k, seed, offset)
    k, v = _repeated(k, q), _repeated(v, q)
    out, sums, seed, offset = operators._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, causal, scale=scale
    )
    return out, sums[:, :, : q.shape[2]], (seed, offset)


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
    if _flash_runs(q):
        cum_q, cum_k, *random = rest
        lengths = (cum_q, cum_k, q.shape[2], k.shape[2])
        return operators._scaled_dot_product_flash_attention_backward(
            gradient, q, k, v, out, sums.contiguous(), *lengths, 0.0, causal, *random, scale=scale
        )
    # Of a query that is not there the exponential has to be zero.
    missing = -q.shape[2] % QUERIES_TOGETHER
    sums = F.pad(sums, (0, missing), value=torch.inf).contiguous()
    all_heads = (_repeated(k, q), _repeated(v, q))
    which = [True, True, True, False]  # gradients of q, k, v, and none of a bias
    dq, dk, dv, _ = operators._scaled_dot_product_efficient_attention_backward(
        gradient, q, *all_heads, None, out, sums, *rest, 0.0, which, causal, scale=scale
    )
    # Each head of keys gets the sum over the heads of queries that share it.
    dk, dv = [each.unflatten(1, (k.shape[1], -1)).sum(2) for each in (dk, dv)]
    return dq, dk, dv


def _flash_runs(q: Tensor) -> bool:
    """Whether flash attention takes these queries, which are on a GPU."""
    if q.dtype not in FLASH_DTYPES:
        return False
    # In a dry run tensors without data are on a GPU that need not be there.
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= AMPERE


def _repeated(heads: Tensor, q: Tensor) -> Tensor:
    """[B, KV, K, E] -> [B, H, K, E]."""
    group = q.shape[1] // heads.shape[1]
    return heads if group == 1 else heads.repeat_interleave(group, dim=1)
