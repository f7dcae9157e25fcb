"""The kernel of sliding window attention for any device: blocks of queries in one call of SDPA.

A text is cut into its head, blocks of C queries, and a rest of fewer than C:

    queries    0 … W + sinks    │ C │ C │ C │ … │ C │    rest
               one causal call  │ one call for all  │ one call

A block reads the W keys before it and its own C, and so overlaps with the next:

    keys       0 1 2 3 4 5 6 7 8 9      W = 4, C = 2
    block 4-5  k k k k k k
    block 6-7      k k k k k k          in every block the same mask [C, W + C]:
    block 8-9          k k k k k k          first query    - x x x x -
                                            second query   - - x x x x

So one SDPA call takes the blocks as the heads of a batch. With sinks, their keys stand before those
of each block.

Shapes: B batch, H heads of queries, KV heads of keys and values, G = H / KV, S sequence,
E head dimension, N blocks of C queries, W window.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._guards import active_fake_mode


def banded_attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int, sinks: int, scale: float | None
) -> Tensor:
    """In a band: token i reads i - window + 1 … i and the first `sinks`: [B, H, S, E], any device.

    q [B, H, S, E], k and v [B, KV, S, E].
    """
    length = q.shape[2]
    k = k.contiguous()
    v = v.contiguous()
    block = block_length(window, sinks)  # C
    head = min(length, window + sinks)  # the windows of all later tokens lie behind the sinks
    rest = (length - head) % block
    blocks_end = length - rest

    pieces = [_head_of_text(q[:, :, :head], k, v, scale)]  # [B, …, H, E] each
    options = {"window": window, "sinks": sinks, "scale": scale}
    if blocks_end > head:
        queries = q[:, :, head:blocks_end]
        pieces.append(_blocks_of_queries(queries, k, v, start=head, block=block, **options))
    if rest:  # one block, shorter than the others
        queries = q[:, :, blocks_end:]
        pieces.append(_blocks_of_queries(queries, k, v, start=blocks_end, block=rest, **options))

    out = pieces[0]
    if len(pieces) > 1:
        out = torch.cat(pieces, dim=1)
    return out.transpose(1, 2)  # [B, H, S, E], in memory as the output projection reads it


def block_length(window: int, sinks: int) -> int:
    """C, the queries of a block of the band: in small blocks the mask hides few scores.

    With less than 64 queries the kernel's tiles would be partly empty. With sinks, of which every
    block has a copy, blocks are longer and so fewer.
    """
    if sinks:
        return max(64, window)
    return max(64, window // 4)


def _head_of_text(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Before the band: causal attention of the first window + sinks tokens -> [B, head, H, E].

    None of them is further than a window from the end of the sinks: they read all before them.
    """
    head = q.shape[2]
    # Copies: what the kernel saves of a view would keep the whole tensor.
    out = F.scaled_dot_product_attention(
        q.contiguous(),
        k[:, :, :head].contiguous(),
        v[:, :, :head].contiguous(),
        is_causal=True,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.transpose(1, 2)


def _blocks_of_queries(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    start: int,
    block: int,
    window: int,
    sinks: int,
    scale: float | None,
) -> Tensor:
    """Blocks of the band: queries q [B, H, N*C, E], from `start` on -> [B, N*C, H, E].

    The blocks become the heads of one SDPA call. The G heads of queries that share a head of keys
    stand below each other in a block, as one matrix of G*C rows.
    """
    B, H, length, _ = q.shape
    KV = k.shape[1]
    G = H // KV
    N = length // block
    end = start + length

    q = q.unflatten(2, (N, block))  # [B, H, N, C, E]
    q = q.unflatten(1, (KV, G))  # [B, KV, G, N, C, E]
    q = q.transpose(2, 3)  # [B, KV, N, G, C, E]
    q = q.flatten(3, 4).flatten(0, 1)  # [B*KV, N, G*C, E]

    bias = block_bias(
        block=block,
        window=window,
        sinks=sinks,
        groups=G,
        dtype=q.dtype,
        device=q.device,
        dry_run=active_fake_mode(),
    )  # [G*C, sinks + W + C]
    places = {"start": start, "end": end, "block": block, "window": window, "sinks": sinks}
    keys = _windows_of(k, **places)  # [B*KV, N, sinks + W + C, E]
    values = _windows_of(v, **places)  # [B*KV, N, sinks + W + C, E]
    out = F.scaled_dot_product_attention(q, keys, values, bias, scale=scale)  # [B*KV, N, G*C, E]

    out = out.unflatten(2, (G, block))  # [B*KV, N, G, C, E]
    out = out.unflatten(0, (B, KV))  # [B, KV, N, G, C, E]
    out = out.permute(0, 2, 4, 1, 3, 5)  # [B, N, C, KV, G, E]
    return out.flatten(3, 4).flatten(1, 2)  # [B, N*C, H, E]


def _windows_of(x: Tensor, *, start: int, end: int, block: int, window: int, sinks: int) -> Tensor:
    """What each block of the band reads, from `start` to `end`: [B*KV, N, sinks + W + C, E]."""
    near = x[:, :, start - window : end]  # [B, KV, W + N*C, E]
    near = near.flatten(0, 1)  # [B*KV, W + N*C, E]
    # Windows of W + C keys, the next one C further: they overlap, and are a view into K.
    near = near.unfold(1, window + block, block)  # [B*KV, N, E, W + C]
    near = near.transpose(2, 3)  # [B*KV, N, W + C, E]
    if not sinks:
        return near
    blocks = near.shape[1]
    first = x[:, :, None, :sinks]  # [B, KV, 1, sinks, E]
    first = first.expand(-1, -1, blocks, -1, -1)  # [B, KV, N, sinks, E]
    first = first.flatten(0, 1)  # [B*KV, N, sinks, E]
    return torch.cat([first, near], dim=2)


def band(queries: int, keys: int, window: int, sinks: int, device: torch.device) -> Tensor:
    """The band: True where a query reads: [queries, keys], the last query at the last key."""
    key = torch.arange(keys, device=device)
    query = torch.arange(keys - queries, keys, device=device)[:, None]
    in_window = key > query - window
    is_sink = key < sinks
    return (key <= query) & (in_window | is_sink)


# Kept, because every layer saves the bias for backward, and all of them shall save the same tensor.
# `dry_run` is part of the key: a dry run needs a bias of its own, without data.
@functools.lru_cache(maxsize=2)
@torch.inference_mode(False)
def block_bias(
    *,
    block: int,
    window: int,
    sinks: int,
    groups: int,
    dtype: torch.dtype,
    device: torch.device,
    dry_run: Any,
) -> Tensor:
    """What is added to the scores of a block of the band: 0 where a query reads, else -inf."""
    reads = band(block, window + block, window, 0, device)  # [C, W + C]
    reads = F.pad(reads, (sinks, 0), value=True)  # [C, sinks + W + C]
    reads = reads.repeat(groups, 1)  # [G*C, sinks + W + C]
    bias = torch.zeros(reads.shape, dtype=dtype, device=device)
    return bias.masked_fill_(~reads, float("-inf"))
