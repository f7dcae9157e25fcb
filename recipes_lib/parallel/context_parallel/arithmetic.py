"""What one rank of context parallelism sends."""

from __future__ import annotations

from typing import Any

from recipes_lib.core.model.causal_lm import decoder_blocks, projection_widths, without_adapters
from recipes_lib.core.model.sizes import trainable_bytes
from recipes_lib.parallel.context_parallel.ulysses import heads_to_send


def predicted_sent_bytes(
    model: Any, *, rows: int, tokens: int, ranks: int, kind: str = "ring"
) -> int:
    """Bytes that one rank sends in a step of whole `rows` of `tokens`, gradients included.

    An all-to-all of X bytes sends (N-1)/N X, an all-reduce in a ring twice that.
    """
    causal = without_adapters(model)
    query, key, _ = projection_widths(causal.config)
    size = causal.dtype.itemsize
    own = rows * tokens // ranks  # the tokens of one rank
    away = (ranks - 1) / ranks
    if kind == "ring":
        keys_and_values = 2 * key * own
        forward = (ranks - 1) * keys_and_values * size
        # Gradients travel in fp32: they are sums over the ranks. The last step brings them home.
        backward = forward + ranks * keys_and_values * max(size, 4)
        if ranks == 1:
            backward = 0
    else:
        head_dim = query // causal.config.num_attention_heads
        heads = heads_to_send(key // head_dim, ranks)
        forward = away * (2 * query + 2 * heads * head_dim) * own * size
        backward = forward
    attention = len(decoder_blocks(model)) * (forward + backward)
    return round(attention + 2 * away * trainable_bytes(model))
