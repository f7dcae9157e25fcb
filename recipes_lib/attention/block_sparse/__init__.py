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

           With `documents` a token reads its own document only.
Saves      Time: `predicted_share_of_pairs` is the share of the pairs that is left. Without `stride`
           the cost grows with S, not S² (on CUDA all but making the mask). It keeps for backward
           what flash attention keeps.
Costs      It is another model: what lies outside the pattern reaches a token only through the
           layers in between, and a pretrained model has to be trained further. Keeping documents
           apart with stride=1, which reads all blocks, loses nothing.
Use when   Attention is a large part of a step (half of it at S = 12 D), or documents share a row.
Not when   The sequence is a few blocks long, or single far tokens decide, as in retrieval; with a
           filled KV cache, padding on the left, or a window of the model's own.
In production   PyTorch's `flex_attention` with `create_block_mask`, here on CUDA; documents:
           `flash_attn_varlen_func`.
Source     Child et al., Sparse Transformers (arXiv 1904.10509); Longformer (2004.05150); BigBird
           (2007.14062).

Trap: a saved model forgets its pattern and runs dense. Call `apply_block_sparse` after every load.

Shapes: B batch, H heads of queries, K heads of keys, S tokens, E head width.

cpu  the kernel for CPUs
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recipes_lib.attention._compiled_flex import compiled_block_mask, compiled_flex_attention
from recipes_lib.attention._unsupported import (
    refuse_other_scores,
    refuse_what_is_left_out,
    under_autocast,
)
from recipes_lib.attention.block_sparse.cpu import BlocksOnCPU
from recipes_lib.core.checks import check_whole
from recipes_lib.core.model.bytes_of_tensors import parts_needed
from recipes_lib.core.model.one_document import restart
from recipes_lib.core.model.probe import proves

# --- the idea: what a learner can copy ------------------------------------------------------------


class Pattern(NamedTuple):
    """Which blocks of keys a block of queries reads: what `**pattern` is in the functions here."""

    block_size: int  # tokens
    local: int = 4  # the last blocks, its own among them
    global_blocks: int = 1  # the first blocks of the text
    stride: int | None = None  # every stride-th block before its own; None for none


def _pattern_reads(query: Tensor, key: Tensor, pattern: Pattern) -> Tensor:
    """The rule for one pair: whether the token at `query` reads the one at `key`."""
    query_block = query // pattern.block_size
    key_block = key // pattern.block_size
    distance = query_block - key_block
    reads = (distance < pattern.local) | (key_block < pattern.global_blocks)
    if pattern.stride is not None:
        reads = reads | (distance % pattern.stride == 0)
    return reads & (key <= query)


def block_sparse_mask(*, seq_len: int, **pattern: int | None) -> Tensor:
    """The pattern as a dense mask [S, S], True where a query reads a key."""
    checked = _checked_pattern(seq_len=seq_len, **pattern)
    tokens = torch.arange(seq_len)
    return _pattern_reads(tokens[:, None], tokens, checked)


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


@proves(
    "exact",
    tried_with={"block_size": 4, "local": 1, "global_blocks": 0, "stride": 1},  # all blocks
    narrow={"block_size": 1, "local": 1, "global_blocks": 0, "stride": None},  # its own
    kernel=True,
)
def apply_block_sparse(model: Any, *, block_size: int, **pattern: int | None) -> Any:
    """Give every attention layer of a Hugging Face causal LM this `Pattern`; returns `model`.

    Right padding is exact. Where `position_ids` restart within a row, a new document begins: give
    no attention mask then, and `use_cache=False`; a model that carries a text past its attention,
    as convolutions do, refuses such rows. `model.set_attn_implementation("sdpa")` takes it back.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    checked = _checked_pattern(block_size=block_size, **pattern)
    refuse_other_scores(model)
    # In the name, so that a deep copy keeps its pattern and another model may have another.
    fields = sorted(checked._asdict().items())
    name = "block_sparse_" + "_".join(f"{field}_{value}" for field, value in fields)
    AttentionInterface.register(name, functools.partial(_attend_in_blocks, pattern=checked))
    AttentionMaskInterface.register(name, _documents)
    model.set_attn_implementation(name)
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
    """
    checked = _checked_pattern(seq_len=q.shape[2], **pattern)
    q, k, v = under_autocast(q, k, v)
    if q.is_cuda:
        return _block_sparse_by_flex(q, k, v, documents, scale, checked)
    reads = block_pattern(seq_len=q.shape[2], **pattern)
    return BlocksOnCPU.apply(q, k, v, documents, scale, checked.block_size, reads)


def block_pattern(*, seq_len: int, **pattern: int | None) -> list[list[int]]:
    """For every block of queries the blocks of keys that it reads: its own is the last."""
    checked = _checked_pattern(seq_len=seq_len, **pattern)
    blocks = parts_needed(seq_len, checked.block_size)
    return [_blocks_read_by(own, checked) for own in range(blocks)]


def _blocks_read_by(own: int, pattern: Pattern) -> list[int]:
    """The blocks of keys that block `own` of the queries reads in the pattern."""
    first_local = max(0, own - pattern.local + 1)
    reads = {*range(first_local, own + 1)}
    reads.update(range(min(pattern.global_blocks, own)))
    if pattern.stride is not None:
        reads.update(range(own, -1, -pattern.stride))
    return sorted(reads)


def _block_sparse_by_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    scale: float | None,
    pattern: Pattern,
) -> Tensor:
    """The kernel for CUDA: PyTorch's FlexAttention, compiled for the pattern."""

    # As it is compiled, no [S, S] tensor is ever made of this rule.
    def reads_in_pattern(row, head, query, key):
        allowed = _pattern_reads(query, key, pattern)
        if documents is None:
            return allowed
        return allowed & (documents[row, query] == documents[row, key])

    rows = None  # one mask serves all rows ...
    if documents is not None:
        rows = len(q)  # ... unless their documents differ
    length = q.shape[2]
    mask = compiled_block_mask(reads_in_pattern, rows, None, length, length, device=q.device)
    return compiled_flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)


def _checked_pattern(*, seq_len: int = 1, **pattern: int | None) -> Pattern:
    checked = Pattern(**pattern)
    check_whole(seq_len=seq_len, block_size=checked.block_size, local=checked.local)
    check_whole(global_blocks=checked.global_blocks, least=0)
    if checked.stride is not None:
        check_whole(stride=checked.stride)
    return checked


# --- what transformers sees of it -----------------------------------------------------------------

# It looks two functions up by the name in the configuration: one makes the mask, once per forward,
# and one computes attention, in every layer. Here the first returns ids of documents [B, S].


def _attend_in_blocks(
    module: Any,
    query: Tensor,  # [B, H, S, E]
    key: Tensor,  # [B, K, S, E]
    value: Tensor,  # [B, K, S, E]
    attention_mask: Tensor | None,  # the documents [B, S], as `_documents` returned them
    *,
    pattern: Pattern,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Block-sparse attention, as transformers calls it in every layer -> [B, S, H, E]."""
    documents = attention_mask
    refuse_what_is_left_out("block-sparse attention", options, "position_bias", dropout=dropout)
    if documents is not None and documents.ndim != 2:
        raise ValueError("block-sparse attention: give an attention mask of [B, S], not of [S, S]")
    positions = options.get("position_ids")
    if documents is None and positions is not None and restart(positions):
        # transformers looks for documents only where there is neither a mask nor a cache.
        raise ValueError(
            "block-sparse attention: positions restart beside a mask or a cache: "
            "give no attention mask, and use_cache=False"
        )
    out = block_sparse_attention(
        query, key, value, documents=documents, scale=scaling, **pattern._asdict()
    )
    return out.transpose(1, 2).contiguous(), None


def _documents(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None,
    device: torch.device,
    **options: Any,
) -> Tensor | None:
    """What transformers calls for the mask of a pattern: ids of documents [B, S], or None for one.

    `mask_function(row, head, query, key)` is the rule by which transformers would make the mask.
    """
    if q_length != kv_length or q_offset != 0:
        raise ValueError(
            "block-sparse attention: a filled KV cache holds no blocks: "
            "generate with use_cache=False"
        )
    window = options.get("local_size") or q_length
    if window < q_length:
        raise ValueError(
            f"block-sparse attention: the model's own window of {window} contradicts it: "
            f"set config.sliding_window = None"
        )
    if attention_mask is not None and (attention_mask[:, 1:] & ~attention_mask[:, :-1]).any():
        raise ValueError(
            "block-sparse attention: padding on the left moves the blocks: pad on the right"
        )

    rows = torch.arange(batch_size, device=device)[:, None]  # [B, 1]
    later = torch.arange(1, q_length, device=device)  # [S-1]
    before = later - 1
    # With `use_vmap` the rule is one that cannot be asked for many pairs at once.
    if options.get("use_vmap") or mask_function(rows, 0, before, later).any():
        raise ValueError("block-sparse attention: the model adds a mask of its own")

    # A document goes on as long as a token may read the one before it.
    goes_on = mask_function(rows, 0, later, before).expand(batch_size, -1)  # [B, S-1]
    if goes_on.all():
        return None
    return torch.nn.functional.pad((~goes_on).cumsum(1), (1, 0))


# --- the arithmetic -------------------------------------------------------------------------------


def predicted_share_of_pairs(*, seq_len: int, block_size: int, **pattern: int | None) -> float:
    """The share of the causal pairs of query and key that the pattern leaves."""
    reads = block_pattern(seq_len=seq_len, block_size=block_size, **pattern)
    pairs = 0
    for own, keys in enumerate(reads):
        queries = min(block_size, seq_len - own * block_size)  # the last block may be shorter
        earlier = block_size * (len(keys) - 1)  # keys that each of these queries reads in full
        within = (queries + 1) / 2  # and on average in its own block
        pairs += queries * (earlier + within)
    causal_pairs = seq_len * (seq_len + 1) / 2
    return pairs / causal_pairs
