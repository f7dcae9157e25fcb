"""The kernel of block-sparse attention for CPUs, forward and backward.

PyTorch has a flash kernel for CPUs that takes dense matrices only. So the keys that a block of
queries reads are copied side by side, and the block meets them as a small dense attention:

    the row        0 1 2 3 4 5 …                        blocks of keys
    query block 5  reads 0, 4, 5      ->   [Q5]   meets   [K0 K4 K5]
    query block 6  reads 0, 5, 6      ->   [Q6]   meets   [K0 K5 K6]      both in one call

Blocks that read equally many keys share a call, because each call costs some 0.1 ms and the
kernel's backward runs one thread per block and head of keys.

Shapes: B batch, H heads of queries, K heads of keys, G = H / K, S tokens, E head width,
g blocks of queries in one call, r queries in one block, n keys that such a block reads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recipes_lib.core.model.second_derivatives import first_derivatives_only


class Call(NamedTuple):
    """One call of the dense kernel, for some blocks of queries."""

    rows: slice  # of the batch
    queries: Tensor  # [g, r], positions in the row
    keys: Tensor  # [g, n], positions in the row
    mask: Tensor  # [1, g or 1, G*r, n], 0 where a query reads and -inf elsewhere


class BlocksOnCPU(torch.autograd.Function):
    """All blocks of queries, in few calls of the dense kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,  # [B, H, S, E]
        k: Tensor,  # [B, K, S, E]
        v: Tensor,  # [B, K, S, E]
        documents: Tensor | None,  # [B, S]
        scale: float | None,
        block_size: int,
        reads: list[list[int]],  # for each block of queries the blocks of keys
    ) -> Tensor:
        """Some sparse blocks a call: q [B, H, S, E], k and v [B, K, S, E] -> [B, H, S, E]."""
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        groups = k.shape[1]
        out = torch.empty_like(q)  # [B, H, S, E]
        # For inputs of 16 bits the kernel gives these logarithms in fp32.
        sums_dtype = torch.promote_types(q.dtype, torch.float32)
        log_sums = torch.empty(q.shape[:3], dtype=sums_dtype)  # [B, H, S]
        for rows, queries, keys, mask in kernel_calls(q, k, documents, block_size, reads):
            part, part_log_sums = kernel(
                _gather_blocks(q[rows], queries, groups),
                _gather_blocks(k[rows], keys, groups),
                _gather_blocks(v[rows], keys, groups),
                attn_mask=mask,
                scale=scale,
            )
            at = queries.flatten()
            out[rows].index_copy_(2, at, _ungather_blocks(part, queries, groups))
            log_sums[rows].index_copy_(2, at, _ungather_blocks(part_log_sums, queries, groups))
        ctx.save_for_backward(q, k, v, documents, out, log_sums)
        ctx.scale = scale
        ctx.block_size = block_size
        ctx.reads = reads
        return out

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The same calls of sparse blocks once more, each for its gradients of q, k and v."""
        q, k, v, documents, out, log_sums = ctx.saved_tensors
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        groups = k.shape[1]
        # Many blocks read the same key. In bf16 the sum of their gradients would lose the later
        # ones, so the sums are made in the dtype of the logs: fp32, or fp64.
        sums = [torch.zeros_like(each, dtype=log_sums.dtype) for each in (q, k, v)]
        for rows, queries, keys, mask in kernel_calls(q, k, documents, ctx.block_size, ctx.reads):
            parts = kernel(
                _gather_blocks(gradient[rows], queries, groups),
                _gather_blocks(q[rows], queries, groups),
                _gather_blocks(k[rows], keys, groups),
                _gather_blocks(v[rows], keys, groups),
                _gather_blocks(out[rows], queries, groups),
                _gather_blocks(log_sums[rows], queries, groups),
                0.0,  # dropout
                False,  # the mask says what is causal
                attn_mask=mask,
                scale=ctx.scale,
            )
            for total, part, at in zip(sums, parts, (queries, keys, keys)):
                gradients = _ungather_blocks(part, at, groups)
                total[rows].index_add_(2, at.flatten(), gradients.to(total.dtype))
        grad_q, grad_k, grad_v = (total.to(q.dtype) for total in sums)
        return grad_q, grad_k, grad_v, None, None, None, None


def kernel_calls(
    q: Tensor, k: Tensor, documents: Tensor | None, block_size: int, reads: list[list[int]]
) -> Iterator[Call]:
    """The calls of the CPU's kernel that together compute all blocks of queries."""
    S = q.shape[2]
    heads_per_key = q.shape[1] // k.shape[1]  # G
    # Without documents all rows of the batch are read alike, and share their calls.
    if documents is None:
        texts = [(slice(None), torch.zeros(S, dtype=torch.long))]
    else:
        texts = [(slice(row, row + 1), ids) for row, ids in enumerate(documents)]
    for rows, ids in texts:
        for blocks in _blocks_of_equal_size(ids, block_size, reads):
            _, keys_of_first = blocks[0]
            # So many that no more keys are gathered than the row has.
            at_a_time = max(1, S // len(keys_of_first))
            for start in range(0, len(blocks), at_a_time):
                together = blocks[start : start + at_a_time]
                queries = torch.stack([query for query, _ in together])  # [g, r]
                keys = torch.stack([key for _, key in together])  # [g, n]
                if documents is None:  # only its own block hides something: one mask serves all
                    mask = _mask_of_blocks(queries[:1], keys[:1], ids, q.dtype)  # [1, r, n]
                else:
                    mask = _mask_of_blocks(queries, keys, ids, q.dtype)  # [g, r, n]
                yield Call(rows, queries, keys, mask.repeat(1, heads_per_key, 1)[None])


def _blocks_of_equal_size(
    ids: Tensor, block_size: int, reads: list[list[int]]
) -> list[list[tuple[Tensor, Tensor]]]:
    """Positions of queries [r] and keys [n] of sparse blocks, those of equal r and n together."""
    S = len(ids)
    by_size = defaultdict(list)
    for block, blocks_of_keys in enumerate(reads):
        start = block * block_size
        query = torch.arange(start, min(S, start + block_size))
        starts = torch.tensor(blocks_of_keys)[:, None] * block_size
        key = (starts + torch.arange(block_size)).flatten()
        key = key[key < S]  # its own block comes last, and may reach beyond the end
        # Keys of documents that none of the queries belongs to are not even gathered.
        key = key[torch.isin(ids[key], ids[query])]
        by_size[len(query), len(key)].append((query, key))
    return list(by_size.values())


def _mask_of_blocks(queries: Tensor, keys: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Sparse blocks [g, r] and [g, n] -> [g, r, n]: -inf for later keys and for other documents."""
    later = keys[:, None] > queries[..., None]
    other_document = ids[keys][:, None] != ids[queries][..., None]
    hidden = later | other_document
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)


def _gather_blocks(x: Tensor, at: Tensor, groups: int) -> Tensor:
    """Sparse blocks of x [B, H, S, …] at the positions [g, r] -> [B*K, g, G*r, …].

    Heads of queries that share a head of keys become one matrix: they meet the same keys.
    """
    x = x.index_select(2, at.flatten())  # [B, H, g*r, …]
    x = x.unflatten(2, at.shape)  # [B, H, g, r, …]
    x = x.unflatten(1, (groups, -1))  # [B, K, G, g, r, …]
    x = x.transpose(2, 3)  # [B, K, g, G, r, …]
    x = x.flatten(3, 4)  # [B, K, g, G*r, …]
    return x.flatten(0, 1)


def _ungather_blocks(part: Tensor, at: Tensor, groups: int) -> Tensor:
    """Sparse blocks go back: [B*K, g, G*r, …] -> [B, H, g*r, …], in the order of `at.flatten()`."""
    part = part.unflatten(0, (-1, groups))  # [B, K, g, G*r, …]
    part = part.unflatten(3, (-1, at.shape[1]))  # [B, K, g, G, r, …]
    part = part.transpose(2, 3)  # [B, K, G, g, r, …]
    part = part.flatten(1, 2)  # [B, H, g, r, …]
    return part.flatten(2, 3)
