"""What one rank of FSDP keeps, and what it sends in a step.

A rank keeps an N-th of each parameter, in whole rows. In a step

    a block          is gathered in forward and again in backward
    everything else  is gathered once
    gradients        are scattered: each rank gets the sum for its part

and a ring of N ranks sends (N - 1) / N of a tensor to gather it, and as much to scatter it.
"""

from __future__ import annotations

from typing import Any

from recipes_lib.core.checks import check_whole
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.parallel._arithmetic import STATES, Kept, part_bytes, trained


def predicted_rank_bytes(model: Any, *, ranks: int) -> Kept:
    """What one of the `ranks` that share a copy of the model keeps, with AdamW."""
    gradients = part_bytes(trained(model), ranks)
    return Kept(part_bytes(model.parameters(), ranks), gradients, STATES * gradients)


def predicted_sent_bytes(model: Any, *, ranks: int, copies: int = 1) -> int:
    """Bytes that one rank sends in a step; a forward alone sends less.

    Over copies (HSDP) the parts of the gradients are added up as DDP does.

    Raises ValueError for ranks that `copies` does not divide.
    """
    check_whole(ranks=ranks, copies=copies)
    if ranks % copies:
        raise ValueError(f"copies={copies}: give a divisor of the {ranks} ranks")
    shards = ranks // copies
    gathered = part_bytes(model.parameters(), shards)
    gathered += part_bytes(decoder_blocks(model).parameters(), shards)  # once more, in backward
    scattered = part_bytes(trained(model), shards)
    in_a_copy = (gathered + scattered) * (shards - 1)
    between_copies = 2 * scattered * (copies - 1) // copies
    return in_a_copy + between_copies
