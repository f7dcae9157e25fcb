"""Whether two documents in a row read each other, and a model that then refuses such rows.

Where `position_ids` restart without a mask, transformers takes a new document to begin. Not every
model tells its attention so, and convolutions and recurrences carry a text past any mask.
"""

from __future__ import annotations

from typing import Any

import torch

from recipes_lib.core.model.causal_lm import trunk
from recipes_lib.core.model.marks import LEAKS_UNDER, mark, marked
from recipes_lib.core.model.output_layer import options_by_name
from recipes_lib.core.model.probe.outcome import TOKENS, TOLERANCE, largest, undisturbed, words_of

LEAST = 0.01  # of the largest logit: what 16 bits may differ by, and a leak exceeds


def refuse_documents_that_leak(model: Any) -> None:
    """Let `model` refuse positions that restart, if a document reads the one before it."""
    if not documents_leak(model):
        return
    module = trunk(model)
    if not marked(module, LEAKS_UNDER):
        module.register_forward_pre_hook(_refuse_restarts, with_kwargs=True)
    mark(module, LEAKS_UNDER, module.config._attn_implementation)


def documents_leak(model: Any) -> bool:
    """Two rows differ in their first document only: do the logits of their second one?"""
    half = TOKENS // 2
    ids = (torch.arange(2 * TOKENS, device=model.device).view(2, -1) * 7 + 3) % words_of(model)
    ids[1, half:] = ids[0, half:]
    positions = (torch.arange(TOKENS, device=model.device) % half).expand(2, -1)
    try:
        with undisturbed(model, training=False):
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    except Exception:  # it refuses them by itself
        return False
    first, second = logits[:, half:].float()
    return bool(largest(first - second) > TOLERANCE.get(model.dtype, LEAST) * largest(first))


def _refuse_restarts(module: Any, args: tuple, options: dict[str, Any]) -> None:
    now = module.config._attn_implementation
    positions = options_by_name(module.forward, args, options).get("position_ids")
    if positions is None or getattr(module, LEAKS_UNDER) != now:
        return
    if (positions.diff() != 1).any():
        raise ValueError(
            f"positions restart, and {type(module).__name__} lets each document of a row read the "
            f"one before it: give one document per row, without position_ids"
        )
