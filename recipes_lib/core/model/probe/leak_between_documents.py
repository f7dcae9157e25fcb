"""Whether two documents in a row read each other."""

from __future__ import annotations

from typing import Any

import torch

from recipes_lib.core.model.probe.outcome import TOKENS, TOLERANCE, largest, undisturbed, words_of

LEAST = 0.05  # of the largest logit: what 16 bits may differ by, and a leak exceeds


def documents_leak(model: Any) -> bool:
    """Whether two documents in a row read each other: in the other order the logits change then."""
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
