"""Ulysses: an all-to-all gives each rank some heads of all tokens, and another one gives them back.

           tokens of rank 0   tokens of rank 1                     all tokens
    head 0      rank 0             rank 1                 head 0     rank 0
    head 1      rank 0             rank 1        ->       head 1     rank 0
    head 2      rank 0             rank 1        <-       head 2     rank 1
    head 3      rank 0             rank 1                 head 3     rank 1

On the right a rank has all that attention needs for its heads, so the usual kernel computes it.

Shapes: B batch, H heads, KV key and value heads, S tokens of a row, N ranks, E head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor
from torch.nn import functional as F

from recipes_lib.core.model.kernels_for_grouped_heads import without_grouped_heads


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, *, group: Any, scale: float) -> Tensor:
    """Causal attention of this rank's tokens to those of all ranks of `group`.

    q [B, H, S/N, E], k and v [B, KV, S/N, E] -> [B, H, S/N, E]. Rank 0 has the first tokens of the
    row, and the last rank the last ones.
    """
    ranks = distributed.get_world_size(group)
    k = with_heads(k, heads_to_send(k.shape[1], ranks))
    v = with_heads(v, heads_to_send(v.shape[1], ranks))
    q = tokens_of_my_heads(q, group)  # [B, H/N, S, E]
    k = tokens_of_my_heads(k, group)
    v = tokens_of_my_heads(v, group)
    if without_grouped_heads(q.device, q.dtype):
        k = with_heads(k, q.shape[1])
        v = with_heads(v, q.shape[1])
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return heads_of_my_tokens(out, group)  # [B, H, S/N, E]


def heads_to_send(kv_heads: int, ranks: int) -> int:
    """So many heads that each rank gets as many in the all-to-all; with few, some share one."""
    return math.lcm(kv_heads, ranks)


def with_heads(tensor: Tensor, heads: int) -> Tensor:
    """For the all-to-all: [B, KV, S, E] -> [B, `heads`, S, E], each head several times."""
    if tensor.shape[1] == heads:
        return tensor
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


def tokens_of_my_heads(tensor: Tensor, group: Any) -> Tensor:
    """All heads of my tokens [B, H, S/N, E] -> all tokens of my heads [B, H/N, S, E]."""
    for_each_rank = tensor.chunk(distributed.get_world_size(group), dim=1)  # its heads
    from_each_rank = exchanged(for_each_rank, group)  # its tokens
    return torch.cat(from_each_rank, dim=2)


def heads_of_my_tokens(tensor: Tensor, group: Any) -> Tensor:
    """The way back: all tokens of my heads [B, H/N, S, E] -> all heads of mine [B, H, S/N, E]."""
    for_each_rank = tensor.chunk(distributed.get_world_size(group), dim=2)  # its tokens
    from_each_rank = exchanged(for_each_rank, group)  # its heads
    return torch.cat(from_each_rank, dim=1)


def exchanged(parts: Sequence[Tensor], group: Any) -> Sequence[Tensor]:
    """Ulysses' all-to-all: part r goes to rank r, one comes from each; gradients go back."""
    one_for_each = [1] * len(parts)
    came = all_to_all_single_autograd(torch.stack(parts), one_for_each, one_for_each, group)
    return wait_tensor(came).unbind(0)
