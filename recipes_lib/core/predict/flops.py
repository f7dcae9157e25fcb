"""How many operations of matrix products a training step needs, whatever a recipe adds to them.

    T tokens through a layer [F, D]     forward            2 T D F
                                        input's gradient   2 T D F
                                        weight's gradient  2 T D F

A multiplication and an addition are two operations. Attention multiplies twice in forward, queries
with keys and scores with values, and four times in backward. Each query sees itself and the tokens
before it, so only half of the square of scores counts.

Divided by the rate of a device, this is the least time of a step. That is why nothing counts that a
recipe does on top: no second forward of a checkpoint, no unpacking of four bits. Norms, activations
and the optimizer multiply no matrices and do not count.
"""

from __future__ import annotations

from typing import Any

from recipes_lib.core.model.causal_lm import decoder_blocks, projection_widths
from recipes_lib.core.model.linears import features, is_linear


def step_operations(model: Any, *, rows: int, length: int) -> int:
    """Operations of one training step of all weights of `model`, on `rows` x `length` tokens.

    Every linear layer counts for every token, and every block attends to all tokens before: a
    mixture of experts and a sliding window do less.
    """
    weights = 0
    for layer in model.modules():
        if is_linear(layer):
            inputs, outputs = features(layer)
            weights += inputs * outputs
    width, _, _ = projection_widths(model.config)  # of all heads together
    pairs = length * (length + 1) // 2  # of a query and a key that it sees
    attention = 2 * 2 * pairs * width * len(decoder_blocks(model))
    forward = rows * (length * 2 * weights + attention)
    return 3 * forward  # backward multiplies twice as often
