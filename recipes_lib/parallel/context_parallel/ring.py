"""Ring attention: queries stay on their rank, keys and values go round, and so do their gradients.

    step 0   every rank: its queries, its keys, causal
    step s   what has come round from s ranks before: a half

In the zig-zag each rank has an early and a late piece of the sequence, so no token is masked:

    from a lower rank     all queries meet the early half of the keys; its late half is the future
    from a higher rank    the late half of the queries meets all keys; the early half sees nothing

Shapes: B batch, H heads, KV key and value heads, S tokens of this rank, E head dimension, N ranks;
Q queries and K keys of a block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed

from recipes_lib.core.model.second_derivatives import first_derivatives_only
from recipes_lib.core.ranks.collectives import exchange


def tokens_of(rank: int, ranks: int, seq: int, *, zig_zag: bool) -> Tensor:
    """The places of a rank's tokens in the sequence of a ring, [S / N], in ascending order."""
    places = torch.arange(seq)
    if not zig_zag:
        return places.chunk(ranks)[rank]
    pieces = places.chunk(2 * ranks)
    return torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]])


def ring_attention(q: Tensor, k: Tensor, v: Tensor, *, group: Any, scale: float) -> Tensor:
    """Causal attention of this rank's queries to the keys of all ranks of `group`.

    q [B, H, S, E], k and v [B, KV, S, E] of the tokens that `tokens_of` names -> [B, H, S, E].
    """
    return _RingAttention.apply(q, k, v, group, scale)


def _queries_that_meet_keys(rank: int, source: int, tokens: int) -> tuple[slice, slice]:
    """Which queries of `rank` meet which keys of `source`, of `tokens` each."""
    everything = slice(0, tokens)
    if source == rank:
        return everything, everything
    if source < rank:
        return everything, slice(0, tokens // 2)
    return slice(tokens // 2, tokens), everything


class _RingAttention(torch.autograd.Function):
    """Forward and backward each go round the ring once."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Any, scale: float) -> Tensor:
        """Attend to the keys of my rank, and then to those that arrive from the rank before."""
        rank = distributed.get_rank(group)
        ranks = distributed.get_world_size(group)
        held = torch.stack([k, v])  # [2, B, KV, S, E]: one message
        own = held
        out = None
        for step in range(ranks):
            message = None
            if step < ranks - 1:
                message = MessageInRing(held, group)  # travels while this rank computes
            if step == 0:
                out, sums, ctx.rest = attend_with_sums(
                    q, held[0], held[1], causal=True, scale=scale
                )
                out = out.to(torch.promote_types(q.dtype, torch.float32))  # a sum over the ranks
            else:
                queries, keys = _queries_that_meet_keys(rank, (rank - step) % ranks, q.shape[2])
                more, more_sums, _ = attend_with_sums(
                    q[:, :, queries], *held[:, :, :, keys], causal=False, scale=scale
                )
                _merge_attention_into(out[:, :, queries], sums[:, :, queries], more, more_sums)
            if message is not None:
                held = message.arrived()
        # Token by token in memory, as the output projection reads it: it need not copy.
        out = out.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2)
        ctx.save_for_backward(q, own, out, sums)
        ctx.options = (group, scale)
        return out

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Keys, values and their gradients go round once more; each rank adds its part."""
        q, held, out, sums = ctx.saved_tensors
        group, scale = ctx.options
        rank = distributed.get_rank(group)
        ranks = distributed.get_world_size(group)
        exact = torch.promote_types(q.dtype, torch.float32)  # sums over ranks are made in fp32
        dq = torch.zeros_like(q, dtype=exact)
        gradients = None  # a message with those of the keys and values that are here now
        dkv = torch.zeros_like(held, dtype=exact)
        for step in range(ranks):
            message = None
            if step < ranks - 1:
                message = MessageInRing(held, group)
            queries, keys = _queries_that_meet_keys(rank, (rank - step) % ranks, q.shape[2])
            more_dq, more_dk, more_dv = attend_backward(
                gradient[:, :, queries],
                (q[:, :, queries], *held[:, :, :, keys]),
                out[:, :, queries],
                sums[:, :, queries],
                ctx.rest,
                causal=step == 0,
                scale=scale,
            )
            dq[:, :, queries] += more_dq
            if gradients is not None:
                dkv = gradients.arrived()
            dkv[0][:, :, keys] += more_dk
            dkv[1][:, :, keys] += more_dv
            if ranks > 1:
                gradients = MessageInRing(dkv, group)  # they travel with what they belong to
            if message is not None:
                held = message.arrived()
        if gradients is not None:
            dkv = gradients.arrived()  # home again
        dk, dv = dkv.to(q.dtype)
        return dq.to(q.dtype), dk, dv, None, None


class MessageInRing:
    """A tensor on its way to the next rank, and one of the same shape from the rank before."""

    def __init__(self, tensor: Tensor, group: Any) -> None:
        """Send `tensor` to the next rank of the ring, and receive one from the rank before."""
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


def _merge_attention_into(out: Tensor, sums: Tensor, more: Tensor, more_sums: Tensor) -> None:
    """In the ring `out` [B, H, S, E] and `sums` [B, H, S] become those over both sets of keys."""
    both = torch.logaddexp(sums, more_sums)
    out.mul_((sums - both).exp().unsqueeze(-1))
    out.add_((more_sums - both).exp().unsqueeze(-1) * more)
    sums.copy_(both)


# --- attention with its log-sum-exp, by PyTorch's own kernels -------------------------------------

# `scaled_dot_product_attention` keeps the log-sum-exp for itself. The operators below it return it,
# and their backward takes that of *all* keys. So each block of a ring gets its exact gradients.
# There is one for CPUs, and one for GPUs from Ampere on, in 16 bits.


def attend_with_sums(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """A step of the ring: out [B, H, Q, E], log-sum-exp [B, H, Q], and what the backward wants.

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
    """A step of the ring back: gradients of q, k, v. `out` and `sums` are those over all keys.

    `rest` is what any `attend_with_sums` of this device has returned: without dropout it says
    nothing about the block.
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
