"""What one rank of context parallelism keeps and sends."""

from __future__ import annotations

import math
from typing import Any

from recipes_lib.core.model.causal_lm import decoder_blocks, projection_widths, without_adapters
from recipes_lib.core.predict.budget import Budget, Order, Shape, estimate
from recipes_lib.core.predict.plain_step import trainable_bytes
from recipes_lib.parallel.context_parallel.ulysses import sent_heads


def predicted_sent_bytes(model: Any, shape: Shape, *, ranks: int, kind: str = "ring") -> int:
    """Bytes that one rank sends in a step of the whole rows of `shape`, gradients included.

    An all-to-all of X bytes sends (N-1)/N X, an all-reduce in a ring twice that.
    """
    causal = without_adapters(model)
    query, key, _ = projection_widths(causal.config)
    size = causal.dtype.itemsize
    tokens = shape.tokens * shape.micro_batches // ranks  # of one rank
    away = (ranks - 1) / ranks
    if kind == "ring":
        keys_and_values = 2 * key * tokens
        forward = (ranks - 1) * keys_and_values * size
        # Gradients travel in fp32: they are sums over the ranks. The last step brings them home.
        backward = forward + ranks * keys_and_values * max(size, 4)
        if ranks == 1:
            backward = 0
    else:
        heads = sent_heads(causal.config, ranks)
        head_dim = query // causal.config.num_attention_heads
        forward = away * (2 * query + 2 * heads * head_dim) * tokens * size
        backward = forward
    attention = len(decoder_blocks(model)) * (forward + backward)
    return round(attention + 2 * away * trainable_bytes(model))


@estimate(Order.SHARDING)
def estimate_context_parallel(
    budget: Budget, model: Any, shape: Shape, *, ranks: int, kind: str = "ring"
) -> Budget:
    """The budget of one rank: what grows with tokens is divided by the number of ranks.

    `shape` is that of the whole rows. A ring has beside that the keys and values that arrive, and
    in backward their gradients. Ulysses keeps the output of attention twice, with some heads of all
    tokens and with all heads of some, and keys and values of heads that several ranks share.
    """
    causal = without_adapters(model)
    query, key, _ = projection_widths(causal.config)
    size = causal.dtype.itemsize
    tokens = math.ceil(shape.tokens / ranks)
    in_backward = 0
    kept_twice = 0
    if kind == "ring" and ranks > 1:
        # Arriving keys and values, and three of their gradients: computed, travelling, arriving.
        in_backward = 2 * key * tokens * (size + 3 * max(size, 4))
    if kind == "ulysses" and ranks > 1:
        head_dim = query // causal.config.num_attention_heads
        shared = sent_heads(causal.config, ranks) * head_dim - key
        kept_twice = (query + 2 * shared) * tokens * size
    blocks = len(decoder_blocks(model))
    return budget.change(
        activations=math.ceil(budget.activations / ranks) + blocks * kept_twice,
        loss=math.ceil(budget.loss / ranks),
        one_block=math.ceil(budget.one_block / ranks) + kept_twice,
        block_gradients=math.ceil(budget.block_gradients / ranks) + in_backward,
    )
