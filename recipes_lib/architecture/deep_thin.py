"""Deep and thin: a small language model spends its weights on more blocks, and narrower ones.

Problem    A language model for a device has some hundred million weights. Large models are wide,
           and a small one that only copies their proportions has few blocks.
Idea       A block has about (10 + 2 K/H) D² weights, so with L of them

               weights of the blocks = L (10 + 2 K/H) D²

           The same number buys 12 blocks of width 768, or 30 of width 485. In the small sizes more
           blocks learn more. Two more things leave weights for blocks: one table for embedding and
           output layer, and few heads of keys and values (`tied_embeddings`,
           `grouped_query_attention`).
Saves      Nothing at equal weights: it is meant to reach a lower loss. The cache is L K/H D wide,
           and so it grows with the square root of L.
Costs      Each block is a step that waits for the one before. Where the time of a token is calls
           more than weights, as in Python on a CPU, twice as many blocks take nearly twice as long;
           in a compiled file much less. Backward keeps activations of L D: they grow as well.
Use when   A model below some hundred million weights is designed for a device.
Not when   The model is trained already: `compression/student` takes blocks away. Large models:
           there depth is no longer what is missing. Where latency counts most, measure first.
In production   SmolLM2-135M (30 blocks, 576 wide), MobileLLM-125M (30 blocks, 576 wide), Gemma 3
           270M: their `config.json`.
Source     Liu et al., "MobileLLM" (arXiv 2402.14905): +2.7 points at 125M, of which depth is a
           part. At 10 to 100 times as many tokens per weight than here.

D hidden, F width of the feed-forward, H heads, K heads of keys and values, L blocks, V vocabulary.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

HEADS_PER_KV = 3  # heads of queries that share keys and values, where the number divides
MULTIPLE_OF = 8  # of which the width of the feed-forward is a multiple

# --- the idea: what a learner can copy ------------------------------------------------------------


def plain_block_weights(hidden: int, middle: int, kv_share: float) -> float:
    """The weights of one block of a deep and thin Llama: attention, feed-forward, two norms."""
    attention = 2 * hidden**2 + 2 * kv_share * hidden**2  # q and o; k and v
    feed_forward = 3 * hidden * middle  # gate, up, down
    return attention + feed_forward + 2 * hidden


# --- the technique --------------------------------------------------------------------------------


class Proportions(NamedTuple):
    """How a Llama-like model spends its weights, as the names of its configuration."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int


def choose_proportions(
    *,
    weights: int,
    layers: int,
    vocabulary: int,
    head_dim: int = 64,
) -> Proportions:
    """The width of a deep and thin model: its `layers` blocks get about this many weights."""
    best = None
    for heads in itertools.count(1):
        hidden = heads * head_dim
        kv_heads = heads
        if heads % HEADS_PER_KV == 0:
            kv_heads = heads // HEADS_PER_KV
        without = plain_block_weights(hidden, 0, kv_heads / heads)
        left = weights - vocabulary * hidden - hidden - layers * without
        middle = round(left / (layers * 3 * hidden * MULTIPLE_OF)) * MULTIPLE_OF
        if middle < 1:
            break  # wider ones have nothing left for the feed-forward
        proportions = Proportions(layers, hidden, middle, heads, kv_heads)
        if best is None or _from_usual_proportions(proportions) < _from_usual_proportions(best):
            best = proportions
    if best is None or not 1 <= best.intermediate_size / best.hidden_size <= 5:
        raise ValueError(
            f"weights={weights:,} for layers={layers} with a vocabulary of {vocabulary:,} and "
            f"heads of {head_dim}: there is no such model with whole heads. Give more weights or "
            f"other layers, or a smaller head_dim"
        )
    return best


def deep_thin_model(*, weights: int, layers: int, vocabulary: int, **options: Any) -> Any:
    """A `LlamaForCausalLM` of these proportions, with fresh weights and one table."""
    from transformers import LlamaConfig, LlamaForCausalLM

    head_dim = options.pop("head_dim", 64)
    proportions = choose_proportions(
        weights=weights, layers=layers, vocabulary=vocabulary, head_dim=head_dim
    )
    sizes = proportions._asdict()
    config = LlamaConfig(
        vocab_size=vocabulary, head_dim=head_dim, tie_word_embeddings=True, **sizes, **options
    )
    return LlamaForCausalLM(config)


def _from_usual_proportions(proportions: Proportions) -> float:
    return abs(proportions.intermediate_size / proportions.hidden_size - 8 / 3)


# --- the arithmetic -------------------------------------------------------------------------------


def predicted_weights(proportions: Proportions, *, vocabulary: int) -> int:
    """All weights of a deep and thin model: one table, the blocks, the last norm."""
    kv_share = proportions.num_key_value_heads / proportions.num_attention_heads
    block = plain_block_weights(proportions.hidden_size, proportions.intermediate_size, kv_share)
    table = vocabulary * proportions.hidden_size
    return round(table + proportions.num_hidden_layers * block + proportions.hidden_size)
