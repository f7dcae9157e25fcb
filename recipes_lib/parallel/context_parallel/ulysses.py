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

from torch import Tensor, distributed
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor
from torch.nn import functional as F

from recipes_lib.core.model.grouped_heads import without_grouped_heads


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, *, group: Any, scale: float) -> Tensor:
    """Causal attention of this rank's tokens to those of all ranks of `group`.

    q [B, H, S/N, E], k and v [B, KV, S/N, E] -> [B, H, S/N, E]. The ranks have the sequence in one
    piece each, in their order.
    """
    ranks = distributed.get_world_size(group)
    sent = math.lcm(k.shape[1], ranks)  # with fewer heads of keys than ranks some share one
    k = _repeated(k, sent // k.shape[1])
    v = _repeated(v, sent // v.shape[1])
    q, k, v = [_heads_to_ranks(tensor, ranks, group) for tensor in (q, k, v)]  # [B, H/N, S, E]
    if without_grouped_heads(q.device, q.dtype):
        groups = q.shape[1] // k.shape[1]
        k, v = _repeated(k, groups), _repeated(v, groups)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return _tokens_to_ranks(out, ranks, group)


def sent_heads(config: Any, ranks: int) -> int:
    """Heads of keys that are sent: the model's, or more where ranks have to share them."""
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return math.lcm(kv_heads, ranks)


def _heads_to_ranks(tensor: Tensor, ranks: int, group: Any) -> Tensor:
    """[B, H, S/N, E] -> [B, H/N, S, E]."""
    to_ranks = tensor.unflatten(1, (ranks, -1)).movedim(1, 0)  # [N, B, H/N, S/N, E], N heads' rank
    from_ranks = _all_to_all(to_ranks, group)  # N is now the rank of the tokens
    return from_ranks.movedim(0, 2).flatten(2, 3)


def _tokens_to_ranks(tensor: Tensor, ranks: int, group: Any) -> Tensor:
    """[B, H/N, S, E] -> [B, H, S/N, E]."""
    to_ranks = tensor.unflatten(2, (ranks, -1)).movedim(2, 0)  # [N, B, H/N, S/N, E], N tokens' rank
    from_ranks = _all_to_all(to_ranks, group)
    return from_ranks.movedim(0, 1).flatten(1, 2)


def _all_to_all(tensor: Tensor, group: Any) -> Tensor:
    """Part r of the first dimension goes to rank r, one part comes from each; backward returns."""
    each = [1] * len(tensor)
    return wait_tensor(all_to_all_single_autograd(tensor.contiguous(), each, each, group))


def _repeated(heads: Tensor, times: int) -> Tensor:
    return heads if times == 1 else heads.repeat_interleave(times, dim=1)
