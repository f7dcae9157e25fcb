"""What another kernel of attention has to know of a model."""

from __future__ import annotations

from typing import Any

from recipes_lib.core.model.causal_lm import without_adapters

# Settings of indexers, which choose the keys of each query.
INDEXER_SETTINGS = ("index_topk", "index_topk_blocks", "indexer_budget")


def selects_keys(model: Any) -> bool:
    """Whether each query reads only the keys that an indexer chooses for it (DeepSeek-V3.2).

    The choice comes as a mask in transformers' own attention; another kernel would leave it out.
    """
    config = without_adapters(model).config.get_text_config()
    return any(getattr(config, name, None) is not None for name in INDEXER_SETTINGS)
