"""The memory of a training step by arithmetic, in lines to read aloud.

    step = plain_step(model, rows=6, length=72)     # a model on "meta" will do
    step.peak                                       # bytes
    print(with_checkpointing(step))

What fills the memory is not all there at the same moment. Forward piles up activations, and at
their top comes the loss. Backward takes activations away, block by block, and leaves gradients:

    weights + states + max( activations + loss                  backward begins
                            activations + one block again       with checkpointing
                            gradients + embedding copies )      the last gradient arrives

It holds for blocks as in Llama, Qwen and Mistral: two RMSNorms, attention without a table of
scores, a gated MLP. For other blocks it is about right: of a mixture of experts those count that a
token visits. It knows nothing of operators, and `predict` knows nothing of this: where the two
agree, neither is wrong by itself.

Recipes change it one by one. The order matters for three: adapters and tiles change what a block
saves, so checkpoints come after them, and what is offloaded or sharded comes after checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from recipes_lib.core.model.bytes_of_tensors import parts_needed, tensor_bytes
from recipes_lib.core.model.causal_lm import decoder_blocks, leaf_names, projection_widths
from recipes_lib.core.model.linears import is_linear

FP32 = 4  # bytes
CHUNK = 64 * 2**20  # bytes of logits and their gradients
CHUNKS_SUMMED_IN_16_BITS = 16  # of a gradient of the output layer
ADAMW = 2  # averages of each number that trains
# Bytes per weight in NF4: half a byte for its code, a byte of scale per 64 weights, and a scale in
# fp32 per 256 of those.
NF4 = 1 / 2 + 1 / 64 + FP32 / (64 * 256)


@dataclass(frozen=True)
class Sizes:
    """What the bytes of the equation follow from."""

    tokens: int  # T, of all rows
    hidden: int  # D
    queries: int  # Q, of all heads together
    keys: int  # KV, those of keys and of values
    feed_forward: int  # F
    blocks: int  # L
    element: int  # bytes of a weight and of an activation
    inputs: int  # bytes of what a block reads [T, D]
    logits: int  # bytes of all of them [T, V], in fp32
    table: int  # bytes of the output layer [V, D]
    tied: bool  # the embedding is the output layer
    linear_bytes: int  # of the linear layers in all blocks
    scores: int  # bytes of a block's, [heads, S, S] of each row, with K and V copied for each head
    angles: int  # bytes of cos and sin [S, Q / heads], which all blocks read
    tile: int  # t, tokens that an MLP sees at a time: all, or some
    norms_in_tiles: bool = False
    frozen: bool = False  # adapters train, and not the weights of the model
    copies: bool = True  # adapters read copies in fp32
    normed: int = 0  # numbers per token that norms of queries and keys read, as in Qwen3
    sums: int = 0  # bytes in which the backward of a GPU's attention adds up


@dataclass(frozen=True)
class StepBytes:
    """The terms of the equation, in bytes."""

    weights: int
    states: int
    gradients: int
    embedding_copies: int  # of a tied table, whose gradient comes from both ends of the model
    activations: int
    loss: int
    one_block: int  # what backward makes again, with checkpointing
    sizes: Sizes

    def parts(self) -> dict[str, dict[str, int]]:
        """What is there at each moment that can be the peak."""
        always = {"weights": self.weights, "states": self.states}
        waits = always | {"activations": self.activations}
        gradients = {"gradients": self.gradients, "embedding copies": self.embedding_copies}
        return {
            "backward begins": waits | {"loss": self.loss},
            "a block is computed again": waits | {"one block": self.one_block},
            "the last gradient arrives": always | gradients,
        }

    def moments(self) -> dict[str, int]:
        """The equation's bytes at each of these moments."""
        return {moment: sum(parts.values()) for moment, parts in self.parts().items()}

    @property
    def peak(self) -> int:
        """Bytes at the largest moment."""
        return max(self.moments().values())

    def __str__(self) -> str:
        lines = []
        for name, value in {**vars(self), "peak": self.peak}.items():
            if name != "sizes" and value > 0:
                lines.append(f"{name.replace('_', ' '):<17}{value / 2**20:>9,.0f} MiB")
        moments = self.moments()
        return "\n".join(lines) + f", when {max(moments, key=moments.get)}"


# --- the plain step: AdamW on all weights ---------------------------------------------------------


def plain_step(model: Any, *, rows: int, length: int) -> StepBytes:
    """The equation of forward, backward and AdamW, all in the dtype of `model`, also on "meta"."""
    sizes = _sizes_of_step(model, rows, length)
    weights = sum(tensor_bytes(parameter) for parameter in model.parameters())
    return StepBytes(
        weights=weights,
        states=ADAMW * weights,
        gradients=weights,
        embedding_copies=2 * sizes.table if sizes.tied else 0,
        activations=_activations(sizes),
        loss=3 * sizes.logits,  # log-softmax and two gradients
        one_block=0,
        sizes=sizes,
    )


def _sizes_of_step(model: Any, rows: int, length: int) -> Sizes:
    """The sizes in the equation, as a configuration and a batch say them."""
    config = model.config.get_text_config()
    queries, keys, feed_forward = projection_widths(config)
    visited = getattr(config, "num_experts_per_tok", None)
    if visited is not None:
        feed_forward = visited * getattr(config, "moe_intermediate_size", feed_forward)
    blocks = decoder_blocks(model)
    linears = [layer.weight for layer in blocks.modules() if is_linear(layer)]
    table = model.get_output_embeddings().weight
    element = table.itemsize
    tokens = rows * length
    heads = config.num_attention_heads
    scores = heads * length + 2 * (queries - keys)
    return Sizes(
        tokens=tokens,
        hidden=config.hidden_size,
        queries=queries,
        keys=keys,
        feed_forward=feed_forward,
        blocks=len(blocks),
        element=element,
        inputs=tokens * config.hidden_size * element,
        logits=tokens * len(table) * FP32,
        table=tensor_bytes(table),
        tied=table is model.get_input_embeddings().weight,
        linear_bytes=sum(map(tensor_bytes, linears)),
        scores=tokens * scores * element,
        angles=2 * length * queries // heads * element,
        tile=tokens,
        normed=queries + keys if "q_norm" in leaf_names(blocks[0]) else 0,
    )


def _activations(sizes: Sizes) -> int:
    """In the equation: what all blocks save for backward, what they share, and the last norm.

    Tiles of an MLP are made again.
    """
    block = _saved_by_attention(sizes)
    if sizes.tile == sizes.tokens:
        block += _mlp(sizes)
    return sizes.blocks * block + _saved_by_norm(sizes) + sizes.angles


def _saved_by_attention(sizes: Sizes) -> int:
    """In the equation: Q, K, V and what comes out, and both norms of the block."""
    of_token = (2 * sizes.queries + 2 * sizes.keys) * sizes.element
    of_token += sizes.normed * (FP32 + sizes.element)  # as they are in fp32, and normalised
    of_token += (sizes.hidden + sizes.queries) * _copied(sizes)
    return sizes.tokens * of_token + 2 * _saved_by_norm(sizes)


def _mlp(sizes: Sizes) -> int:
    """In the equation: gate, up, the activated gate, and the product, of a tile."""
    of_token = 4 * sizes.feed_forward * sizes.element
    of_token += (sizes.hidden + sizes.feed_forward) * _copied(sizes)
    return sizes.tile * of_token


def _in_attention(sizes: Sizes) -> int:
    """In the equation, while attention's backward runs on a GPU: its sums, and the gradients."""
    if not sizes.sums:
        return 0
    gradients = (2 * sizes.queries + 2 * sizes.keys) * sizes.element
    return sizes.sums + sizes.tokens * gradients


def _copied(sizes: Sizes) -> int:
    """Adapters read a copy in fp32 of each number of 16 bits, unless autocast spares it."""
    return FP32 if sizes.frozen and sizes.copies and sizes.element < FP32 else 0


def _saved_by_norm(sizes: Sizes) -> int:
    """In the equation RMSNorm saves its input in fp32, that normalised if it trains, its output."""
    if sizes.norms_in_tiles:
        return 2 * sizes.inputs  # what goes in and out
    in_fp32 = sizes.tokens * sizes.hidden * FP32
    return in_fp32 + (1 if sizes.frozen else 2) * sizes.inputs


# --- what recipes change --------------------------------------------------------------------------


def with_adapters(step: StepBytes, *, rank: int, copies: bool = True) -> StepBytes:
    """The equation with LoRA on all linear layers of the blocks: `rank` numbers for each end.

    Args:
        copies: peft's layers read a copy in fp32 of what has 16 bits. Those on four bits do not,
            under the autocast of a GPU.
    """
    sizes = replace(step.sizes, frozen=True, copies=copies)
    ends = 7 * sizes.hidden + 2 * sizes.queries + 2 * sizes.keys + 3 * sizes.feed_forward
    adapters = FP32 * rank * ends * sizes.blocks
    return replace(
        step,
        weights=step.weights + adapters,
        gradients=adapters,
        states=ADAMW * adapters,
        embedding_copies=0,
        activations=_activations(sizes),
        sizes=sizes,
    )


def on_flash_attention(step: StepBytes) -> StepBytes:
    """The equation with the sums of FlashAttention's backward: q's gradient in fp32, and where
    heads share keys and values, the gradients of both for each head.
    """
    sizes = step.sizes
    of_token = FP32 * sizes.queries
    if sizes.keys < sizes.queries:
        of_token += 2 * sizes.element * sizes.queries
    return replace(step, sizes=replace(sizes, sums=sizes.tokens * of_token))


def in_four_bits(step: StepBytes) -> StepBytes:
    """The equation with QLoRA's base: linear layers of the blocks in NF4, double quantization."""
    whole = step.sizes.linear_bytes
    packed = round(whole / step.sizes.element * NF4)
    sizes = replace(step.sizes, linear_bytes=packed)
    return replace(step, weights=step.weights - whole + packed, sizes=sizes)


def with_eager_attention(step: StepBytes) -> StepBytes:
    """The equation with all scores [heads, S, S] after the softmax, and K, V copied per head."""
    sizes = step.sizes
    return replace(step, activations=step.activations + sizes.blocks * sizes.scores)


def with_tiled_mlp(step: StepBytes, *, tile: int, norms: bool = False) -> StepBytes:
    """The equation with tiles: MLPs, and norms too, see `tile` tokens and keep what they read."""
    tile = min(tile, step.sizes.tokens)
    sizes = replace(step.sizes, tile=tile, norms_in_tiles=norms)
    return replace(step, activations=_activations(sizes), sizes=sizes)


def with_checkpointing(step: StepBytes, *, group: int = 1) -> StepBytes:
    """The equation with checkpoints: each block keeps its input [T, D]; nested, each group does.

    Backward makes one block again and the gradients in it: of its output, of the gate and of the
    product. Nested checkpoints make the inputs of a group again, too.
    """
    sizes = step.sizes
    ways = 2 if _copied(sizes) else 1  # gradients of an adapter and of the layer beside it meet
    gradients = (1 + ways) * sizes.tile * sizes.feed_forward * sizes.element
    inside_mlp = _mlp(sizes) + gradients
    if sizes.tile < sizes.tokens:
        # The gradient of the input grows beside that of the output: with all of one tile, or when
        # the parts of all tiles are put together.
        inside_mlp = sizes.inputs + max(inside_mlp, sizes.inputs)
    # By the time of attention's backward, what the second norm has saved is free.
    at_mlp, at_attention = ways * sizes.inputs + inside_mlp, _in_attention(sizes)
    again = _saved_by_attention(sizes) + max(at_mlp, at_attention - _saved_by_norm(sizes))
    if sizes.element == FP32:  # the first norm reads the input itself, and no copy in fp32
        again -= sizes.inputs
    if not sizes.frozen:
        again += sizes.table  # its gradient is there by then
    groups = parts_needed(sizes.blocks, group)
    # In a block: the inputs of all groups up to its own, and of the blocks of its own up to it.
    inputs = max(block // group + 1 + block % group for block in range(sizes.blocks))
    last_norm = _saved_by_norm(sizes)  # it is free before a block is made again
    return replace(
        step,
        activations=groups * sizes.inputs + sizes.angles + last_norm,
        one_block=(inputs - groups) * sizes.inputs + again - last_norm,
    )


def with_inputs_elsewhere(step: StepBytes, *, in_flight: int = 0) -> StepBytes:
    """The equation with checkpointed inputs on the host or on disk; that of the last block stays.

    Nothing is left that backward uses up. So its highest moment is in the first block, beside the
    gradients of all others, or so many blocks earlier that `in_flight` inputs are on their way.
    """
    sizes = step.sizes
    away = sizes.blocks - 1
    of_a_block = min(step.gradients, sizes.linear_bytes) / sizes.blocks
    on_their_way = min(in_flight, away)
    in_the_first = away * of_a_block
    before_it = (away - on_their_way) * of_a_block + on_their_way * sizes.inputs
    return replace(
        step,
        activations=step.activations - away * sizes.inputs,
        one_block=step.one_block + int(max(in_the_first, before_it)),
    )


def with_chunked_loss(step: StepBytes) -> StepBytes:
    """The equation with a loss in chunks: 64 MiB of a chunk's logits and of their gradients.

    The gradients of the output layer and of what it reads [T, D] are whole. To that of a tied table
    the second half is added in place: there is one copy. In 16 bits more than sixteen chunks are
    summed in fp32, beside the gradient that they become.
    """
    sizes = step.sizes
    of_table = 0 if sizes.frozen else sizes.table
    in_16_bits = sizes.element < FP32
    if in_16_bits and sizes.logits * sizes.element // FP32 > CHUNKS_SUMMED_IN_16_BITS * CHUNK:
        of_table *= 3
    return replace(
        step,
        loss=min(CHUNK, 2 * sizes.logits) + 2 * sizes.inputs + of_table,
        embedding_copies=step.embedding_copies // 2,
    )


def with_states_in(step: StepBytes, *, bits: int) -> StepBytes:
    """The equation with AdamW's averages in 16 bits, or in 8 but for those of the embedding."""
    sizes = step.sizes
    element = FP32 if sizes.frozen else sizes.element  # of what trains
    in_fp32 = sizes.table // element if bits == 8 and not sizes.frozen else 0
    numbers = step.states // (ADAMW * element) - in_fp32
    return replace(step, states=ADAMW * (numbers * bits // 8 + in_fp32 * FP32))


def with_step_in_backward(step: StepBytes) -> StepBytes:
    """The equation with a gradient used at once. That of a tied table waits for its second half."""
    return replace(step, gradients=0)


def sharded(step: StepBytes, *, ranks: int) -> StepBytes:
    """The equation of FSDP: a rank keeps its parts, and gathers block by block.

    In the backward of a block four of its size are there: the block, the next one, which arrives,
    and gradients, those that are made and those of the block before, on their way. An output layer
    that is tied to the embedding is whole from forward to backward, and its gradient waits.
    """
    sizes = step.sizes
    block = sizes.linear_bytes // sizes.blocks
    table = sizes.table
    tied = table if sizes.tied else 0
    if sizes.frozen:  # no gradients but those of adapters
        loss = 3 * sizes.logits
        of_blocks = 2 * block
        copies = 0
    else:
        # The gradients of the loss; or that of the output layer, and a block that arrives.
        loss = max(3 * sizes.logits, sizes.logits + table + block)
        of_blocks = 4 * block
        # The gradient of the embedding, as made and as sent; tied, those of both ends.
        copies = 2 * table
        if sizes.tied:
            copies = 4 * table - table // ranks + block
    return replace(
        step,
        weights=step.weights // ranks,
        gradients=step.gradients // ranks,
        states=step.states // ranks,
        activations=step.activations + tied,
        loss=loss + table - tied,  # gathered for the loss alone
        one_block=step.one_block + of_blocks + tied,
        embedding_copies=copies,
    )
