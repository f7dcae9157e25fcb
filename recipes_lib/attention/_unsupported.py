"""What models do in their own attention, and another kernel would leave out in silence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recipes_lib.core.model.causal_lm import without_adapters

# Settings of indexers, which choose the keys of each query.
INDEXER_SETTINGS = ("index_topk", "index_topk_blocks", "indexer_budget")
# What transformers hands to a kernel beside queries, keys and values.
OPTIONS = ("softcap", "s_aux", "indices", "output_attentions")


def selects_keys(model: Any) -> bool:
    """Whether each query reads only the keys that an indexer chooses for it (DeepSeek-V3.2).

    The choice comes as a mask in transformers' own attention; another kernel would leave it out.
    """
    config = without_adapters(model).config.get_text_config()
    return any(getattr(config, name, None) is not None for name in INDEXER_SETTINGS)


def refuse_other_scores(model: Any) -> None:
    """Raise ValueError for scores that another kernel leaves out: of an indexer, under a cap."""
    if selects_keys(model):
        raise ValueError("an indexer selects the keys of each query, which would be left out")
    cap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    if cap:
        raise ValueError(f"no kernel here caps its scores (attn_logit_softcapping={cap})")


def refuse_what_is_left_out(
    kernel: str, given: dict[str, Any], *names: str, dropout: float
) -> None:
    """Raise ValueError for what another kernel leaves out: `OPTIONS`, these names, and dropout."""
    asked = []
    for name in (*OPTIONS, *names):
        value = given.get(name)
        if value is not None and value is not False:
            asked.append(name)
    if dropout:
        asked.append("dropout")
    if asked:
        raise ValueError(
            f"{kernel} has no {asked[0]} here: set it to 0 or None in the model, or take 'eager' "
            f"attention"
        )


def under_autocast(*tensors: Tensor) -> list[Tensor]:
    """Queries, keys and values in the dtype of autocast, which another kernel would leave out.

    Rotary embeddings and norms of heads leave queries and keys in fp32, beside values in 16 bits.
    """
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [tensor.to(dtype) for tensor in tensors]
