"""Block-sparse attention: each block of queries reads a few blocks of keys, not all of them.

Problem    Causal attention multiplies S²/2 pairs of a query and a key: at 16K tokens most of a training step.
Idea       Cut the sequence into blocks. A block of queries reads the `local` blocks that end with its own, the first
           `global_blocks`, and every `stride`-th one before its own; inside its own it is causal:

               local=2, global_blocks=1    ■ . . . . .      local=1, stride=3    ■ . . . . .
                                           ■ ■ . . . .                           . ■ . . . .
                                           ■ ■ ■ . . .                           . . ■ . . .
                                           ■ . ■ ■ . .                           ■ . . ■ . .

           With `documents` it reads its own only. What is read is laid side by side for the dense kernel.
Saves      Time: `estimate_block_sparse` is the share of the pairs that is left. Without `stride` the cost grows with
           S, not S² (on CUDA all but making the mask). It keeps for backward what flash attention keeps.
Costs      It is another model: what lies outside the pattern reaches a token only through the layers in between, and
           a pretrained model has to be trained further. Keeping documents apart (stride=1: all blocks) loses nothing.
Use when   Attention is a large part of a step (half of it at S = 12 D), or documents share a row.
Not when   The sequence is a few blocks long, or single far tokens decide, as in retrieval.
In production   PyTorch's `flex_attention` with `create_block_mask`, here on CUDA; documents: `flash_attn_varlen_func`.
Source     Child et al., Sparse Transformers (arXiv 1904.10509); Longformer (2004.05150); BigBird (2007.14062).

A silent trap: a saved model forgets its pattern and runs dense. Call `apply_block_sparse` after every load.
Shapes: B batch, H heads of queries, K of keys, G = H/K, S tokens, E head width, r queries in one block, n keys.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


def apply_block_sparse(model: Any, *, block_size: int, **pattern: int | None) -> Any:
    """Give every attention layer of a Hugging Face causal LM a pattern, as in `block_pattern`; returns `model`.

    Right padding is exact. Rows with `position_ids` that restart (no attention mask, `use_cache=False`) are documents.
    `model.set_attn_implementation("sdpa")` takes it back. Raises ValueError for a pattern that does not exist and for
    capped scores; the model's forward raises one for whatever else does not go with the pattern.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    block_pattern(seq_len=1, **(pattern := {"block_size": block_size} | pattern))
    # The pattern is in the name and the name in the config: a deep copy keeps it, another model may have another.
    name = "block_sparse_" + "_".join(f"{key}_{pattern[key]}" for key in sorted(pattern))
    AttentionInterface.register(name, functools.partial(_attend, pattern=pattern))
    AttentionMaskInterface.register(name, _documents)
    _refuse(
        getattr(model.config.get_text_config(), "attn_logit_softcapping", None),
        "capped scores: keep 'eager'",
    )
    model.set_attn_implementation(name)
    _refuse(
        model.config._attn_implementation != name,
        f"{type(model).__name__} does not use AttentionInterface",
    )
    return model


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    documents: Tensor | None = None,
    scale: float | None = None,
    **pattern: Any,
) -> Tensor:
    """Attention [B, H, S, E] of q [B, H, S, E] over k, v [B, K, S, E] in a pattern, as in `block_pattern`; equal to
    dense attention under `block_sparse_mask`, forward and backward. `documents` [B, S] are ids. Raises ValueError for
    a pattern that does not exist, shapes that do not fit, and a device without a kernel."""
    (B, H, S, E), device = q.shape, q.device.type
    fits = k.shape == v.shape == (B, k.shape[1], S, E) and H % k.shape[1] == 0
    _refuse(
        not fits,
        f"q {[*q.shape]}, k {[*k.shape]}, v {[*v.shape]}: give [B, H, S, E], twice [B, K, S, E]",
    )
    _refuse(
        documents is not None and documents.shape != (B, S),
        f"give one id of a document per token, [{B}, {S}]",
    )
    _refuse(
        device not in ("cpu", "cuda"),
        f"no kernel for the device {device}: move the model to cpu or cuda",
    )
    block_pattern(seq_len=S, **pattern)
    if torch.is_autocast_enabled(device):  # as PyTorch's own attention does
        q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    return (_flex if device == "cuda" else _Blocks.apply)(q, k, v, documents, scale, pattern)


def block_pattern(
    *,
    seq_len: int,
    block_size: int,
    local: int = 4,
    global_blocks: int = 1,
    stride: int | None = None,
) -> list[list[int]]:
    """For every block of queries the blocks of keys that it reads, in ascending order: its own is the last."""
    given, least = (
        dict(locals()),
        min(seq_len, block_size, local, 1 if stride is None else stride, global_blocks + 1),
    )
    _refuse(least < 1, f"{given}: give 1 or more, 0 or more global_blocks, stride=None for none")
    rows = []
    for i in range(-(-seq_len // block_size)):
        far = range(i, -1, -stride) if stride else ()
        rows.append(
            sorted({*range(min(global_blocks, i)), *range(max(0, i - local + 1), i + 1), *far})
        )
    return rows


def block_sparse_mask(*, seq_len: int, **pattern: int | None) -> Tensor:
    """The pattern as a dense mask [S, S], True where a query reads a key: for pictures and tests, not for training."""
    block_pattern(seq_len=seq_len, **pattern)
    return _seen(torch.arange(seq_len)[:, None], torch.arange(seq_len), **pattern)


def _seen(query, key, *, block_size, local=4, global_blocks=1, stride=None) -> Tensor:
    i, j = query // block_size, key // block_size
    seen = (i - j < local) | (j < global_blocks)
    return (seen | ((i - j) % stride == 0) if stride else seen) & (key <= query)


def estimate_block_sparse(*, seq_len: int, block_size: int, **pattern: int | None) -> float:
    """The share of the causal pairs of query and key, and so of attention's arithmetic, that the pattern leaves."""
    reads = block_pattern(seq_len=seq_len, block_size=block_size, **pattern)
    sizes = [min(block_size, seq_len - i * block_size) for i in range(len(reads))]
    pairs = sum(r * (block_size * (len(keys) - 1) + (r + 1) / 2) for r, keys in zip(sizes, reads))
    return pairs / (seq_len * (seq_len + 1) / 2)


class _Blocks(torch.autograd.Function):
    """The CPU arm. It saves what the dense kernel saves: q, k, v, the output and its log-sum-exp."""

    @staticmethod
    def forward(ctx, q, k, v, documents, scale, pattern):
        out, lse = (
            torch.empty_like(q),
            torch.empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32)),
        )
        ctx.scale, ctx.pattern, kernel = (
            scale,
            pattern,
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
        )
        for rows, query, key, mask in _calls(q, k, documents, **pattern):
            inputs = (_take(x, rows, at, k.shape[1]) for x, at in ((q, query), (k, key), (v, key)))
            for whole, part in zip((out, lse), kernel(*inputs, attn_mask=mask, scale=scale)):
                whole[rows].index_copy_(2, query.flatten(), _back(part, query, k.shape[1]))
        ctx.save_for_backward(q, k, v, documents, out, lse)
        return out

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, documents, out, lse = ctx.saved_tensors
        wholes = [torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v)]
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        for rows, query, key, mask in _calls(q, k, documents, **ctx.pattern):
            pairs = (gradient, query), (q, query), (k, key), (v, key), (out, query), (lse, query)
            inputs = (_take(x, rows, at, k.shape[1]) for x, at in pairs)
            parts = kernel(*inputs, 0.0, False, attn_mask=mask, scale=ctx.scale)
            for whole, part, at in zip(wholes, parts, (query, key, key)):
                whole[rows].index_add_(2, at.flatten(), _back(part, at, k.shape[1]).to(whole.dtype))
        return *(whole.to(q.dtype) for whole in wholes), None, None, None


def _take(x: Tensor, rows: slice, at: Tensor, groups: int) -> Tensor:
    """[B, H, S, …] at the positions [g, r] -> [B*K, g, G*r, …]: heads with the same keys are one matrix."""
    x = x[rows].index_select(2, at.flatten()).unflatten(2, at.shape).unflatten(1, (groups, -1))
    return x.transpose(2, 3).flatten(3, 4).flatten(0, 1)


def _back(part: Tensor, at: Tensor, groups: int) -> Tensor:
    return (
        part.unflatten(0, (-1, groups))
        .unflatten(3, (-1, at.shape[1]))
        .transpose(2, 3)
        .flatten(1, 2)
        .flatten(2, 3)
    )


def _calls(q, k, documents, **pattern):
    """For each call of the kernel: rows of the batch, where its queries [g, r] and keys [g, n] are, its mask."""
    S, b = q.shape[2], pattern["block_size"]
    for row, ids in enumerate(torch.zeros(1, S) if documents is None else documents):
        rows, groups = slice(None) if documents is None else slice(row, row + 1), defaultdict(list)
        for i, keys in enumerate(block_pattern(seq_len=S, **pattern)):
            query = torch.arange(i * b, min(S, i * b + b))
            key = (torch.tensor(keys)[:, None] * b + torch.arange(b)).flatten()[
                : len(query) - b or None
            ]
            key = key[torch.isin(ids[key], ids[query])]
            groups[len(query), len(key)].append((query, key))
        for (_, n), members in groups.items():
            for start in range(
                0, len(members), max(1, S // n)
            ):  # so that no more keys are gathered than there are
                query, key = map(torch.stack, zip(*members[start : start + max(1, S // n)]))
                i, j = (
                    (query, key) if documents is not None else (query[:1], key[:1])
                )  # else one mask serves all
                hidden = (j[:, None] > i[..., None]) | (ids[j][:, None] != ids[i][..., None])
                mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, -torch.inf)
                yield (
                    rows,
                    query,
                    key,
                    mask.repeat(1, q.shape[1] // k.shape[1], 1)[None],
                )  # [1, g or 1, G*r, n]


def _flex(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor | None, scale: float | None, pattern: dict
) -> Tensor:
    def seen(row, head, query, key):  # compiled on CUDA, no [S, S] tensor is made of it
        allowed = _seen(query, key, **pattern)
        return allowed if ids is None else allowed & (ids[row, query] == ids[row, key])

    sizes = None if ids is None else len(q), None, q.shape[2], q.shape[2]
    mask = torch.compile(create_block_mask)(seen, *sizes, device=q.device)
    return torch.compile(flex_attention)(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)


def _attend(
    module, query, key, value, attention_mask, *, pattern, scaling=None, dropout=0.0, **options
):
    """What transformers calls in every layer; `attention_mask` is what `_documents` returned."""
    odd = dropout or any(
        options.get(name) is not None for name in ("softcap", "position_bias", "s_aux")
    )
    _refuse(
        odd,
        "attention dropout (set it to 0), a cap, a bias or a sink of the scores have no kernel: keep 'eager'",
    )
    _refuse(not getattr(module, "is_causal", True), "only causal attention has a pattern here")
    _refuse(
        attention_mask is not None and attention_mask.ndim != 2,
        "give an attention mask of [B, S], not of [S, S]",
    )
    packed = (
        attention_mask is None
        and (at := options.get("position_ids")) is not None
        and (at.diff() != 1).any()
    )
    _refuse(
        packed,
        "positions restart beside a mask or a cache: give no attention mask, and use_cache=False",
    )
    out = block_sparse_attention(
        query, key, value, documents=attention_mask, scale=scaling, **pattern
    )
    return out.transpose(1, 2).contiguous(), None


def _documents(
    batch_size, q_length, kv_length, q_offset, mask_function, attention_mask, device, **options
):
    """What transformers calls for its mask, once per forward: ids of the documents [B, S], or None for one in each."""
    _refuse(
        q_length != kv_length or q_offset != 0,
        "a filled KV cache holds no blocks: generate with use_cache=False",
    )
    window, pad = options.get("local_size") or q_length, attention_mask
    _refuse(
        window < q_length,
        f"the model's own window of {window} contradicts it: set config.sliding_window = None",
    )
    _refuse(
        pad is not None and (pad[:, 1:] & ~pad[:, :-1]).any(),
        "padding on the left moves the blocks: pad right",
    )
    row, at = (
        torch.arange(batch_size, device=device)[:, None],
        torch.arange(1, q_length, device=device),
    )
    _refuse(
        options.get("use_vmap") or mask_function(row, 0, at - 1, at).any(),
        "the model adds a mask of its own",
    )
    joined = mask_function(row, 0, at, at - 1).expand(
        batch_size, -1
    )  # [B, S-1]: with the token before it
    return None if joined.all() else torch.nn.functional.pad((~joined).cumsum(1), (1, 0))


def _refuse(wrong: Any, message: str) -> None:
    if wrong:
        raise ValueError(f"block-sparse attention: {message}")
