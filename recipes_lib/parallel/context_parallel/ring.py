"""Ring attention: queries stay on their rank, keys and values go round, and so do their gradients.

    step 0   every rank: its queries, its keys, causal
    step s   what has come round from s ranks before: all of it, a half, or nothing

In the zig-zag each rank has an early and a late piece of the sequence. So what comes round is never
masked token by token:

    from a lower rank     all queries meet the early half of the keys; its late half is the future
    from a higher rank    the late half of the queries meets all keys; the early half sees nothing

Shapes: B batch, H heads, KV key and value heads, S tokens of this rank, E head dimension, N ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from recipes_lib.core.model.second_derivatives import first_derivatives_only
from recipes_lib.core.ranks.collectives import exchange
from recipes_lib.parallel.context_parallel.kernels import attend, attend_backward


class Part(NamedTuple):
    """Which queries of a rank meet which keys of another, in tokens from the front or the back."""

    queries: str  # "all", "late" or "none"
    keys: str  # "all" or "early"
    causal: bool
    work: float  # the share of all pairs of a query and a key


def part_of(rank: int, source: int, *, zig_zag: bool) -> Part:
    """What `rank` computes with the keys of `source`."""
    if source == rank:
        return Part("all", "all", causal=True, work=0.5)
    if zig_zag and source < rank:
        return Part("all", "early", causal=False, work=0.5)
    if zig_zag:
        return Part("late", "all", causal=False, work=0.5)
    if source < rank:
        return Part("all", "all", causal=False, work=1.0)
    return Part("none", "all", causal=False, work=0.0)


def tokens_of(rank: int, ranks: int, seq: int, *, zig_zag: bool) -> Tensor:
    """The places in the sequence of a rank's tokens, [S / N], in ascending order."""
    places = torch.arange(seq)
    if not zig_zag:
        return places.chunk(ranks)[rank]
    pieces = places.chunk(2 * ranks)
    return torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]])


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, group: Any, scale: float, zig_zag: bool = True
) -> Tensor:
    """Causal attention of this rank's queries to the keys of all ranks of `group`.

    q [B, H, S, E], k and v [B, KV, S, E] of the tokens that `tokens_of` names -> [B, H, S, E].
    """
    return _RingAttention.apply(q, k, v, group, scale, zig_zag)


class _RingAttention(torch.autograd.Function):
    """Forward and backward each go round the ring once."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Any, scale: float, zig_zag: bool
    ) -> Tensor:
        rank = distributed.get_rank(group)
        ranks = distributed.get_world_size(group)
        held = torch.stack([k, v])  # [2, B, KV, S, E]: one message
        own = held
        out = None
        for step in range(ranks):
            message = None
            if step < ranks - 1:
                message = Message(held, group)  # travels while this rank computes
            part = part_of(rank, (rank - step) % ranks, zig_zag=zig_zag)
            if step == 0:
                out, sums, ctx.rest = attend(q, held[0], held[1], causal=True, scale=scale)
                out = out.to(torch.promote_types(q.dtype, torch.float32))  # a sum over the ranks
            elif part.queries != "none":
                queries, keys = _slices(part, q.shape[2])
                more, more_sums, _ = attend(
                    q[:, :, queries], *held[:, :, :, keys], causal=False, scale=scale
                )
                _merge_into(out[:, :, queries], sums[:, :, queries], more, more_sums)
            if message is not None:
                held = message.arrived()
        # Token by token in memory, as the output projection reads it: it need not copy.
        out = out.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2)
        ctx.save_for_backward(q, own, out, sums)
        ctx.options = (group, scale, zig_zag)
        return out

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, held, out, sums = ctx.saved_tensors
        group, scale, zig_zag = ctx.options
        rank = distributed.get_rank(group)
        ranks = distributed.get_world_size(group)
        exact = torch.promote_types(q.dtype, torch.float32)  # sums over ranks are made in fp32
        dq = torch.zeros_like(q, dtype=exact)
        gradients = None  # a message with those of the keys and values that are here now
        dkv = torch.zeros_like(held, dtype=exact)
        for step in range(ranks):
            message = None
            if step < ranks - 1:
                message = Message(held, group)
            part = part_of(rank, (rank - step) % ranks, zig_zag=zig_zag)
            more = None
            if part.queries != "none":
                queries, keys = _slices(part, q.shape[2])
                more_dq, *more = attend_backward(
                    gradient[:, :, queries],
                    (q[:, :, queries], *held[:, :, :, keys]),
                    out[:, :, queries],
                    sums[:, :, queries],
                    ctx.rest,
                    causal=part.causal,
                    scale=scale,
                )
                dq[:, :, queries] += more_dq
            if gradients is not None:
                dkv = gradients.arrived()
            if more is not None:
                dkv[0][:, :, keys] += more[0]
                dkv[1][:, :, keys] += more[1]
            if ranks > 1:
                gradients = Message(dkv, group)  # they travel with what they belong to
            if message is not None:
                held = message.arrived()
        if gradients is not None:
            dkv = gradients.arrived()  # home again
        dk, dv = dkv.to(q.dtype)
        return dq.to(q.dtype), dk, dv, None, None, None


class Message:
    """A tensor on its way to the next rank, and one of the same shape from the rank before."""

    def __init__(self, tensor: Tensor, group: Any) -> None:
        rank = distributed.get_rank(group)
        ranks = distributed.get_world_size(group)
        self._sent = tensor.contiguous()  # it has to stay as it is until it has left
        self._arriving = torch.empty_like(self._sent)
        to, source = (rank + 1) % ranks, (rank - 1) % ranks
        self._works = exchange(self._sent, self._arriving, target=to, source=source, group=group)

    def arrived(self) -> Tensor:
        """Wait, and give what the rank before has sent."""
        for work in self._works:
            work.wait()
        return self._arriving


def _slices(part: Part, tokens: int) -> tuple[slice, slice]:
    """The queries and the keys of a part, of `tokens` each."""
    half = tokens // 2
    queries = slice(half, tokens) if part.queries == "late" else slice(0, tokens)
    keys = slice(0, half) if part.keys == "early" else slice(0, tokens)
    return queries, keys


def _merge_into(out: Tensor, sums: Tensor, more: Tensor, more_sums: Tensor) -> None:
    """`out` [B, H, S, E] and `sums` [B, H, S] become those over both sets of keys, in place."""
    both = torch.logaddexp(sums, more_sums)
    out.mul_((sums - both).exp().unsqueeze(-1))
    out.add_((more_sums - both).exp().unsqueeze(-1) * more)
    sums.copy_(both)
