"""Queries, keys and values, attention under a dense mask, and the gradients of both."""

import torch


def random_qkv(batch, heads, kv_heads, seq_len, width, dtype=torch.float32, device="cpu"):
    """As a model hands them over: [B, S, H, E] seen as [B, H, S, E]."""
    qkv = []
    for count in (heads, kv_heads, kv_heads):
        tensor = torch.randn(batch, seq_len, count, width, dtype=dtype, device=device)
        qkv.append(tensor.transpose(1, 2).requires_grad_())
    return qkv


def attention_under(mask, q, k, v, *, scale=None):
    """The reference: all scores, and a mask [S, S] or [B, 1, S, S], True where a query reads."""
    groups = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(groups, dim=1)
    v = v.repeat_interleave(groups, dim=1)
    scores = q @ k.transpose(2, 3) * (scale or q.shape[3] ** -0.5)
    return scores.masked_fill(~mask.to(q.device), float("-inf")).softmax(-1) @ v


def with_gradients(attend, qkv, **options):
    """The output, and the gradients of q, k and v."""
    out = attend(*qkv, **options)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out.detach(), *torch.autograd.grad(out, qkv, upstream)]
