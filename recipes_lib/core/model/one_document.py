"""A model that refuses several documents in a row, because each would read the one before it.

Where `position_ids` restart without a mask, transformers takes a new document to begin. Not every
model tells its attention so, and convolutions and recurrences carry a text past any mask.
"""

from __future__ import annotations

from typing import Any

import torch

from recipes_lib.core.measure import dry
from recipes_lib.core.model.causal_lm import trunk
from recipes_lib.core.model.marks import ONE_DOCUMENT_UNDER, mark, marked
from recipes_lib.core.model.output_layer import options_by_name


def require_one_document(model: Any) -> None:
    """Let `model` refuse positions that restart, for as long as it has the attention of now."""
    module = trunk(model)
    if not marked(module, ONE_DOCUMENT_UNDER):
        module.register_forward_pre_hook(_refuse_restarts, with_kwargs=True)
    mark(module, ONE_DOCUMENT_UNDER, module.config._attn_implementation)


def restart(positions: torch.Tensor) -> bool:
    """Whether a second document begins within a row. OPT gives padding the position -1."""
    return bool(((positions.diff() != 1) & (positions[..., 1:] >= 0)).any())


def _refuse_restarts(module: Any, args: tuple, options: dict[str, Any]) -> None:
    """Before each forward: raise ValueError if a document begins within a row."""
    positions = options_by_name(module.forward, args, options).get("position_ids")
    another = getattr(module, ONE_DOCUMENT_UNDER) != module.config._attn_implementation
    if positions is None or another or dry():
        return
    if restart(positions):
        raise ValueError(
            f"positions restart, as in packed rows, and in this {type(module).__name__} each "
            f"document would read the one before it: give one document per row"
        )
