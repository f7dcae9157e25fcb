"""Whether two documents in a row read each other, and a model that then refuses such rows.

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
from recipes_lib.core.model.probe.outcome import TOKENS, TOLERANCE, largest, undisturbed, words_of

LEAST = 0.05  # of the largest logit: what 16 bits may differ by, and a leak exceeds


def require_one_document(model: Any) -> None:
    """Let `model` refuse positions that restart, for as long as it has the attention of now."""
    module = trunk(model)
    if not marked(module, ONE_DOCUMENT_UNDER):
        module.register_forward_pre_hook(_refuse_restarts, with_kwargs=True)
    mark(module, ONE_DOCUMENT_UNDER, module.config._attn_implementation)


def documents_leak(model: Any) -> bool:
    """Two documents in a row, in one order and in the other: does the place change the logits?"""
    half = TOKENS // 2
    ids = (torch.arange(TOKENS, device=model.device) * 7 + 3) % words_of(model)
    rows = torch.stack([ids, ids.roll(half)])
    positions = (torch.arange(TOKENS, device=model.device) % half).expand(2, -1)
    try:
        with undisturbed(model, training=False):
            logits = model(input_ids=rows, position_ids=positions, use_cache=False).logits
    except Exception:  # it refuses them by itself
        return False
    behind = logits[0, half:].float()
    in_front = logits[1, :half].float()  # where no other document can be read
    limit = TOLERANCE.get(model.dtype, LEAST) * largest(in_front)
    return bool(largest(behind - in_front) > limit)


def restart(positions: torch.Tensor) -> bool:
    """Whether a document begins within a row. OPT gives padding the position -1."""
    return bool(((positions.diff() != 1) & (positions[..., 1:] >= 0)).any())


def _refuse_restarts(module: Any, args: tuple, options: dict[str, Any]) -> None:
    positions = options_by_name(module.forward, args, options).get("position_ids")
    another = getattr(module, ONE_DOCUMENT_UNDER) != module.config._attn_implementation
    if positions is None or another or dry():
        return
    if restart(positions):
        raise ValueError(
            f"positions restart, as in packed rows, and in this {type(module).__name__} each "
            f"document would read the one before it: give one document per row"
        )
