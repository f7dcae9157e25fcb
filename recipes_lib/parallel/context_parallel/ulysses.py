"""Ulysses: an all-to-all gives each rank some heads of all tokens, and another one gives them back.

           tokens of rank 0   tokens of rank 1                     all tokens
    head 0      rank 0             rank 1                 head 0     rank 0
    head 1      rank 0             rank 1        ->       head 1     rank 0
    head 2      rank 0             rank 1        <-       head 2     rank 1
    head 3      rank 0             rank 1                 head 3     rank 1

Shapes: B batch, H heads, KV key and value heads, S tokens of a row, N ranks, E head dimension.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import functional

from recipes_lib.core.model.second_derivatives import first_derivatives_only
from recipes_lib.core.predict.plain_step import without_grouped_heads


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any,
    scale: float,
    documents: Tensor | None = None,
) -> Tensor:
    """Causal attention of this rank's tokens to those of all ranks of `group`.

    q [B, H, S/N, E], k and v [B, KV, S/N, E] -> [B, H, S/N, E]. The ranks have the sequence in one
    piece each, in their order. `documents` [B, S] numbers the documents of whole rows; no token
    sees another document.
    """
    ranks = distributed.get_world_size(group)
    repeats = _shared(k.shape[1], ranks) // k.shape[1]
    if repeats > 1:  # fewer heads of keys than ranks: some ranks share one
        k = k.repeat_interleave(repeats, dim=1)
        v = v.repeat_interleave(repeats, dim=1)
    q = _HeadsToRanks.apply(q, group)  # [B, H/N, S, E]
    k = _HeadsToRanks.apply(k, group)
    v = _HeadsToRanks.apply(v, group)
    if q.shape[1] > k.shape[1] and without_grouped_heads(q.device, q.dtype):
        groups = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(groups, dim=1)
        v = v.repeat_interleave(groups, dim=1)
    mask = None
    if documents is not None:
        mask = _document_mask(documents)
    out = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return _TokensToRanks.apply(out, group)


def sent_heads(config: Any, ranks: int) -> int:
    """Heads of keys that are sent: the model's, or more where ranks have to share them."""
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return _shared(kv_heads, ranks)


def _shared(kv_heads: int, ranks: int) -> int:
    """The smallest number of heads that is a multiple of both."""
    return math.lcm(kv_heads, ranks)


def _document_mask(documents: Tensor) -> Tensor:
    """True where a query (row) may see a key (column): [B, 1, S, S]."""
    same = documents[:, :, None] == documents[:, None, :]
    return same.tril().unsqueeze(1)


class _HeadsToRanks(torch.autograd.Function):
    """[B, H, S/N, E] -> [B, H/N, S, E]; backward is the way back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _heads_to_ranks(tensor, group)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _tokens_to_ranks(gradient, ctx.group), None


class _TokensToRanks(torch.autograd.Function):
    """[B, H/N, S, E] -> [B, H, S/N, E]."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _tokens_to_ranks(tensor, group)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _heads_to_ranks(gradient, ctx.group), None


def _heads_to_ranks(tensor: Tensor, group: Any) -> Tensor:
    ranks = distributed.get_world_size(group)
    to_ranks = tensor.unflatten(1, (ranks, -1)).movedim(1, 0)  # [N, B, H/N, S/N, E], N heads' rank
    from_ranks = _all_to_all(to_ranks, group)  # N is now the rank of the tokens
    return from_ranks.movedim(0, 2).flatten(2, 3)


def _tokens_to_ranks(tensor: Tensor, group: Any) -> Tensor:
    ranks = distributed.get_world_size(group)
    to_ranks = tensor.unflatten(2, (ranks, -1)).movedim(2, 0)  # [N, B, H/N, S/N, E], N tokens' rank
    from_ranks = _all_to_all(to_ranks, group)
    return from_ranks.movedim(0, 1).flatten(1, 2)


def _all_to_all(tensor: Tensor, group: Any) -> Tensor:
    """Part r of the first dimension goes to rank r; from each rank comes one part."""
    sent = tensor.contiguous()
    received = torch.empty_like(sent)
    distributed.all_to_all_single(received, sent, group=group)
    return received
