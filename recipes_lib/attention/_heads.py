"""What kernels of attention have to know of a model and of their queries, keys and values."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from recipes_lib.core.model.causal_lm import without_adapters

# Settings of indexers, which choose the keys of each query.
INDEXER_SETTINGS = ("index_topk", "index_topk_blocks", "indexer_budget")


def selects_keys(model: Any) -> bool:
    """Whether each query reads only the keys that an indexer chooses for it (DeepSeek-V3.2).

    The choice comes as a mask in transformers' own attention; another kernel would leave it out.
    """
    config = without_adapters(model).config.get_text_config()
    return any(getattr(config, name, None) is not None for name in INDEXER_SETTINGS)


def check_heads(q: Tensor, k: Tensor, v: Tensor, *, allowed: str) -> None:
    """Queries [B, H, S, E] go with keys and values [B, K, S, E], as attention takes them.

    Every head of keys serves the same number of heads of queries. Raises ValueError, which says
    with `allowed` what to give, in the letters of the caller.
    """
    fits = q.dim() == k.dim() == 4 and k.shape == v.shape
    fits = fits and len(k) == len(q) and k.shape[2:] == q.shape[2:]
    fits = fits and q.shape[1] % k.shape[1] == 0
    if not fits:
        raise ValueError(f"q {[*q.shape]}, k {[*k.shape]}, v {[*v.shape]}: give {allowed}")
