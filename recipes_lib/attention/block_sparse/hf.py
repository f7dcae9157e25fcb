"""What transformers calls in a model with block-sparse attention.

transformers looks two functions up by the name that `config._attn_implementation` holds: one makes
the mask, once per forward, and one computes attention, in every layer. Ours leave no [S, S] mask:
what the first returns, and the second gets, are the ids of the documents in each row.

Shapes: B batch, H heads of queries, K heads of keys, S tokens, E head width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recipes_lib.attention.block_sparse import Pattern, block_sparse_attention


def register(pattern: Pattern, *, documents: bool = True) -> str:
    """Make the pattern known to transformers; returns its name there.

    The pattern is in the name and the name in the config: a deep copy of a model keeps its pattern,
    and another model may have another. Without `documents`, rows that hold several are refused.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    fields = sorted(pattern._asdict().items())
    name = "block_sparse_" + "_".join(f"{field}_{value}" for field, value in fields)
    find_documents = _documents
    if not documents:
        name += "_one_document"
        find_documents = _one_document
    AttentionInterface.register(name, functools.partial(_attend, pattern=pattern))
    AttentionMaskInterface.register(name, find_documents)
    return name


def _attend(
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
    """What transformers calls in every layer -> [B, S, H, E], and no attention weights."""
    documents = attention_mask
    changes = ("softcap", "position_bias", "s_aux", "indices")
    changed_scores = [options.get(name) for name in changes]
    if dropout or any(change is not None for change in changed_scores):
        raise ValueError(
            "block-sparse attention has no kernel for attention dropout (set it to 0), nor for a "
            "cap, a bias or a sink of the scores: keep 'eager'"
        )
    if not getattr(module, "is_causal", True):
        raise ValueError("block-sparse attention: only causal attention has a pattern here")
    if documents is not None and documents.ndim != 2:
        raise ValueError(
            "block-sparse attention: give an attention mask of [B, S], not of [S, S]; a model that "
            "makes one of its own keeps its attention"
        )
    positions = options.get("position_ids")
    if documents is None and positions is not None and (positions.diff() != 1).any():
        # transformers looks for packed rows only where there is neither a mask nor a cache.
        raise ValueError(
            "block-sparse attention: positions restart beside a mask or a cache: "
            "give no attention mask, and use_cache=False"
        )
    out = block_sparse_attention(
        query, key, value, documents=documents, scale=scaling, **pattern._asdict()
    )
    return out.transpose(1, 2).contiguous(), None


def _one_document(*args: Any, attention_mask: Tensor | None, **options: Any) -> Tensor | None:
    """As `_documents`, for a model that has more than attention to carry tokens past a border."""
    documents = _documents(*args, attention_mask=attention_mask, **options)
    if documents is not None and attention_mask is None:
        raise ValueError(
            "block-sparse attention: positions restart, and the convolutions or recurrences of "
            "this model do not know the borders of documents: give one document per row"
        )
    return documents


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
    """What transformers calls for its mask: ids of the documents [B, S], or None for one per row.

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
