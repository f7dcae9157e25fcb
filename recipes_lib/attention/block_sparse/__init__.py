"""Block-sparse attention: each block of queries reads a few blocks of keys, not all of them.

Problem    Causal attention multiplies S²/2 pairs of a query and a key: at 16K tokens that is most
           of the time of a training step.
Idea       Cut the sequence into blocks. A block of queries reads the `local` blocks that end with
           its own, the first `global_blocks`, and every `stride`-th one before its own; inside its
           own it is causal:

               local=2, global_blocks=1    ■ . . . . .      local=1, stride=3    ■ . . . . .
                                           ■ ■ . . . .                           . ■ . . . .
                                           ■ ■ ■ . . .                           . . ■ . . .
                                           ■ . ■ ■ . .                           ■ . . ■ . .

           With `documents` a token reads its own document only. On a CPU the keys that are read
           are laid side by side for the dense kernel.
Saves      Time: `predicted_share_of_pairs` is the share of the pairs that is left. Without `stride`
           the cost grows with S, not S² (on CUDA all but making the mask). It keeps for backward
           what flash attention keeps.
Costs      It is another model: what lies outside the pattern reaches a token only through the
           layers in between, and a pretrained model has to be trained further. Keeping documents
           apart with stride=1, which reads all blocks, loses nothing.
Use when   Attention is a large part of a step (half of it at S = 12 D), or documents share a row.
Not when   The sequence is a few blocks long, or single far tokens decide, as in retrieval.
In production   PyTorch's `flex_attention` with `create_block_mask`, here on CUDA; documents:
           `flash_attn_varlen_func`.
Source     Child et al., Sparse Transformers (arXiv 1904.10509); Longformer (2004.05150); BigBird
           (2007.14062).

A silent trap: a saved model forgets its pattern and runs dense. Call `apply_block_sparse` after
every load.

The kernel for CPUs is in cpu.py, what transformers calls in hf.py.

Shapes: B batch, H heads of queries, K heads of keys, S tokens, E head width.

cpu  its kernel for CPUs
hf  what transformers calls for it
"""

from __future__ import annotations

import inspect
import re
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recipes_lib.attention._compiled_flex import compiled_block_mask, compiled_flex_attention
from recipes_lib.attention.block_sparse.cpu import BlocksOnCPU
from recipes_lib.core.checks import check_heads, check_number, check_whole
from recipes_lib.core.model.causal_lm import (
    decoder_blocks,
    reads_beside_attention,
    require_causal_lm,
    selects_keys,
    trunk,
)
from recipes_lib.core.model.sizes import parts_needed

# --- the idea: what a learner can copy ------------------------------------------------------------


class Pattern(NamedTuple):
    """Which blocks of keys a block of queries reads: what `**pattern` is in the functions here."""

    block_size: int  # tokens
    local: int = 4  # the last blocks, its own among them
    global_blocks: int = 1  # the first blocks of the text
    stride: int | None = None  # every stride-th block before its own; None for none


def _reads(query: Tensor, key: Tensor, pattern: Pattern) -> Tensor:
    """The rule for one pair: whether the token at `query` reads the one at `key`."""
    query_block = query // pattern.block_size
    key_block = key // pattern.block_size
    distance = query_block - key_block
    reads = (distance < pattern.local) | (key_block < pattern.global_blocks)
    if pattern.stride is not None:
        reads = reads | (distance % pattern.stride == 0)
    return reads & (key <= query)


def block_sparse_mask(*, seq_len: int, **pattern: int | None) -> Tensor:
    """The pattern as a dense mask [S, S], True where a query reads a key.

    For pictures and tests: in training it would be what the technique avoids.
    """
    checked = _checked_pattern(seq_len=seq_len, **pattern)
    tokens = torch.arange(seq_len)
    return _reads(tokens[:, None], tokens, checked)


def plain_block_sparse_attention(q: Tensor, k: Tensor, v: Tensor, **pattern: int | None) -> Tensor:
    """Dense attention under the whole mask: the same numbers at the price of all S² pairs.

    q [B, H, S, E], k and v [B, K, S, E] -> [B, H, S, E].
    """
    groups = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(groups, dim=1)  # [B, H, S, E]
    v = v.repeat_interleave(groups, dim=1)  # [B, H, S, E]
    mask = block_sparse_mask(seq_len=q.shape[2], **pattern).to(q.device)  # [S, S]
    scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5  # [B, H, S, S]
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v


# --- the technique --------------------------------------------------------------------------------


def apply_block_sparse(model: Any, *, block_size: int, **pattern: int | None) -> Any:
    """Give every attention layer of a Hugging Face causal LM this `Pattern`; returns `model`.

    Right padding is exact. Where `position_ids` restart within a row, a new document begins: give
    no attention mask then, and `use_cache=False`; a hybrid with convolutions or recurrences takes
    one document per row. `model.set_attn_implementation("sdpa")` takes it back.
    Raises ValueError for a pattern that does not exist, for capped scores, and for a model whose
    attention cannot be exchanged; the model's forward raises one for whatever else does not go with
    the pattern.
    """
    # Here, because it imports this file.
    from recipes_lib.attention.block_sparse.hf import register

    require_causal_lm(model)
    checked = _checked_pattern(block_size=block_size, **pattern)
    _refuse_model(model)
    name = register(checked, documents=not reads_beside_attention(model))
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise ValueError(
            f"transformers cannot set the attention of {type(model).__name__}: keep its own"
        )
    return model


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    documents: Tensor | None = None,
    scale: float | None = None,
    **pattern: int | None,
) -> Tensor:
    """Attention of q [B, H, S, E] over k and v [B, K, S, E] in a `Pattern` -> [B, H, S, E].

    Equal to dense attention under `block_sparse_mask`, forward and backward.

    Args:
        documents: ids [B, S]; a token reads tokens of the same id only.
        scale: of the scores, by default 1 / sqrt(E).
    Raises ValueError for a pattern that does not exist, shapes that do not fit, and a device
    without a kernel.
    """
    if scale is not None:
        check_number(scale=scale)
    _check_tensors(q, k, v, documents)
    checked = _checked_pattern(seq_len=q.shape[2], **pattern)
    device = q.device.type
    if torch.is_autocast_enabled(device):  # as PyTorch's own attention does
        dtype = torch.get_autocast_dtype(device)
        q = q.to(dtype)
        k = k.to(dtype)
        v = v.to(dtype)
    if device == "cuda":
        return _flex(q, k, v, documents, scale, checked)
    reads = block_pattern(seq_len=q.shape[2], **pattern)
    return BlocksOnCPU.apply(q, k, v, documents, scale, checked.block_size, reads)


def block_pattern(*, seq_len: int, **pattern: int | None) -> list[list[int]]:
    """For every block of queries the blocks of keys that it reads, ascending: its own is the last.

    Raises ValueError for a pattern that does not exist.
    """
    checked = _checked_pattern(seq_len=seq_len, **pattern)
    blocks = parts_needed(seq_len, checked.block_size)
    return [_blocks_read_by(own, checked) for own in range(blocks)]


def _blocks_read_by(own: int, pattern: Pattern) -> list[int]:
    first_local = max(0, own - pattern.local + 1)
    reads = {*range(first_local, own + 1)}
    reads.update(range(min(pattern.global_blocks, own)))
    if pattern.stride is not None:
        reads.update(range(own, -1, -pattern.stride))
    return sorted(reads)


def _flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    scale: float | None,
    pattern: Pattern,
) -> Tensor:
    """The kernel for CUDA: PyTorch's FlexAttention, compiled for the pattern."""

    # As it is compiled, no [S, S] tensor is ever made of this rule.
    def reads(row, head, query, key):
        allowed = _reads(query, key, pattern)
        if documents is None:
            return allowed
        return allowed & (documents[row, query] == documents[row, key])

    rows = None  # one mask serves all rows ...
    if documents is not None:
        rows = len(q)  # ... unless their documents differ
    length = q.shape[2]
    mask = compiled_block_mask(reads, rows, None, length, length, device=q.device)
    return compiled_flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)


# --- Hugging Face glue and guards -----------------------------------------------------------------


def _checked_pattern(*, seq_len: int = 1, **pattern: int | None) -> Pattern:
    checked = Pattern(**pattern)
    check_whole(seq_len=seq_len, block_size=checked.block_size, local=checked.local)
    check_whole(global_blocks=checked.global_blocks, least=0)
    if checked.stride is not None:
        check_whole(stride=checked.stride)
    return checked


def _refuse_model(model: Any) -> None:
    """Raise ValueError for what this attention cannot reach, or cannot compute."""
    modules = decoder_blocks(model).modules()
    has_attention = any(hasattr(module, "is_causal") for module in modules)
    if not has_attention or not model._supports_attention_backend:
        raise ValueError(
            f"{type(model).__name__} has no attention that is looked up by its name: "
            f"block-sparse attention cannot reach it"
        )
    if selects_keys(model):
        raise ValueError(
            f"{type(model).__name__} selects the keys of each query by an indexer, which the "
            f"pattern would leave out: keep this model's attention"
        )
    if reads_beside_attention(model) and not _tells_positions(model):
        raise ValueError(
            f"{type(model).__name__} does not tell its attention where documents begin, and its "
            f"recurrence would carry one into the next unseen: keep this model's attention"
        )
    cap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    if cap:
        raise ValueError(
            f"block-sparse attention has no kernel for capped scores "
            f"(attn_logit_softcapping={cap}): keep 'eager'"
        )


def _tells_positions(model: Any) -> bool:
    """Whether the model makes its masks with the positions, by which documents are found."""
    forward = inspect.getsource(type(trunk(model)).forward)
    return (
        re.search(r"""position_ids["']: \w*position_ids|[( ]position_ids=\w""", forward) is not None
    )


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> None:
    check_heads(q, k, v, allowed="q [B, H, S, E], and k and v [B, K, S, E] with H a multiple of K")
    B, _, S, _ = q.shape
    if documents is not None and documents.shape != (B, S):
        raise ValueError(
            f"documents {[*documents.shape]}: give one id of a document per token, [{B}, {S}]"
        )
    if q.device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"block-sparse attention has no kernel for the device {q.device.type}: "
            f"move the model to cpu or cuda"
        )


# --- the arithmetic -------------------------------------------------------------------------------


def predicted_share_of_pairs(*, seq_len: int, block_size: int, **pattern: int | None) -> float:
    """The share of the causal pairs of query and key that the pattern leaves.

    It is also the share of attention's arithmetic, but for the future half of each block's own
    keys, which the kernel computes and hides. Raises ValueError for a pattern that does not exist.
    """
    reads = block_pattern(seq_len=seq_len, block_size=block_size, **pattern)
    pairs = 0
    for own, keys in enumerate(reads):
        queries = min(block_size, seq_len - own * block_size)  # the last block may be shorter
        earlier = block_size * (len(keys) - 1)  # keys that each of these queries reads in full
        within = (queries + 1) / 2  # and on average in its own block
        pairs += queries * (earlier + within)
    causal_pairs = seq_len * (seq_len + 1) / 2
    return pairs / causal_pairs
