"""The memory of a training step by arithmetic, in lines to read aloud.

    step = plain_step(model, rows=6, length=72)     # a model on "meta" will do
    step.peak                                       # bytes
    print(with_checkpointing(step))

What fills the memory is not all there at the same moment. Forward piles up activations, and at
their top comes the loss. Backward takes activations away, block by block, and leaves gradients:

    weights + states + max( activations + loss                  backward begins
                            activations + one block again       with checkpointing
                            gradients + copies of the table )   the last gradient arrives

It holds for blocks as in Llama, Qwen and Mistral: two RMSNorms, attention without a table of
scores, a gated MLP. For other blocks it is about right: of a mixture of experts those count that a
token visits. It knows nothing of operators, and `predict` knows nothing of this: where the two
agree, neither is wrong by itself.

Letters: P weights, T tokens = rows x length, D hidden, Q and KV width of all heads and of those of
keys and values, F feed-forward, L blocks, V vocabulary, r rank of adapters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from recipes_lib.core.checks import check_whole
from recipes_lib.core.model.bytes_of_tensors import parts_needed, tensor_bytes
from recipes_lib.core.model.causal_lm import decoder_blocks, leaf_names, projection_widths
from recipes_lib.core.model.linears import features, is_linear

FP32 = 4  # bytes
CHUNK = 64 * 2**20  # bytes of logits and their gradients
ADAMW = 2  # averages of each number that trains
# Bytes per weight in NF4: half a byte for its code, a byte of scale per 64 weights, and a scale in
# fp32 per 256 of those.
NF4 = 1 / 2 + 1 / 64 + FP32 / (64 * 256)
# Of the terms, in print.
NAMES = {"copies": "embedding copies", "loss": "logits", "one_block": "one block again"}


@dataclass(frozen=True)
class Sizes:
    """What the bytes of a step follow from."""

    tokens: int  # T
    hidden: int  # D
    queries: int  # Q
    keys: int  # KV
    feed_forward: int  # F
    blocks: int  # L
    vocabulary: int  # V
    element: int  # bytes of a weight and of an activation
    table: int  # bytes of the output layer V D
    tied: bool  # the embedding is the output layer
    scores: int  # bytes of those of a block's attention, [heads, S, S] of each row
    in_mlp: int  # tokens that an MLP sees at a time: t where it works in tiles, else T
    linears: int  # weights of the linear layers in all blocks
    linear_bytes: int  # of those weights: in 16 or 32 bits, or in four
    ends: int  # weights of the two sides of those layers: the numbers that adapters have per rank
    normed: int  # numbers per token that norms of queries and keys read, as in Qwen3
    norms_in_tiles: bool = False


@dataclass(frozen=True)
class StepBytes:
    """The terms of the equation, in bytes."""

    weights: int
    states: int
    gradients: int
    copies: int  # of a tied table, whose gradient comes from both ends of the model
    activations: int
    loss: int
    one_block: int  # what backward makes again, with checkpointing
    sizes: Sizes

    def moments(self) -> dict[str, int]:
        """The bytes that are alive at each moment that can be the peak."""
        always = self.weights + self.states
        return {
            "backward begins": always + self.activations + self.loss,
            "a block is computed again": always + self.activations + self.one_block,
            "the last gradient arrives": always + self.gradients + self.copies,
        }

    @property
    def peak(self) -> int:
        """Bytes at the largest moment."""
        return max(self.moments().values())

    def __str__(self) -> str:
        terms = {name: value for name, value in vars(self).items() if name != "sizes" and value}
        lines = [_line(NAMES.get(name, name), value) for name, value in terms.items()]
        moments = self.moments()
        highest = max(moments, key=moments.get)
        return "\n".join([*lines, f"{_line('peak', self.peak)}, when {highest}"])


def _line(name: str, size: int) -> str:
    return f"{name:<17}{size / 2**20:>9,.0f} MiB"


def _sizes_of(model: Any, rows: int, length: int) -> Sizes:
    check_whole(rows=rows, length=length)
    tokens = rows * length
    config = model.config.get_text_config()
    queries, keys, feed_forward = projection_widths(config)
    visited = getattr(config, "num_experts_per_tok", None)
    if visited is not None:
        feed_forward = visited * getattr(config, "moe_intermediate_size", feed_forward)
    blocks = decoder_blocks(model)
    table = model.get_output_embeddings().weight
    element = table.dtype.itemsize
    normed = queries + keys if "q_norm" in leaf_names(blocks[0]) else 0
    in_blocks = [features(layer) for layer in blocks.modules() if is_linear(layer)]
    linears = sum(inputs * outputs for inputs, outputs in in_blocks)
    return Sizes(
        tokens=tokens,
        hidden=config.hidden_size,
        queries=queries,
        keys=keys,
        feed_forward=feed_forward,
        blocks=len(blocks),
        vocabulary=config.vocab_size,
        element=element,
        scores=config.num_attention_heads * tokens * length * element,
        in_mlp=tokens,
        table=tensor_bytes(table),
        tied=table is model.get_input_embeddings().weight,
        linears=linears,
        linear_bytes=linears * element,
        ends=sum(inputs + outputs for inputs, outputs in in_blocks),
        normed=normed,
    )


# --- the plain step: AdamW on all weights ---------------------------------------------------------


def plain_step(model: Any, *, rows: int, length: int) -> StepBytes:
    """Forward, backward and AdamW, all in the dtype of `model`, which may be on "meta"."""
    sizes = _sizes_of(model, rows, length)
    weights = sum(tensor_bytes(parameter) for parameter in model.parameters())
    return StepBytes(
        weights=weights,
        states=ADAMW * weights,
        gradients=weights,
        copies=2 * sizes.table if sizes.tied else 0,
        activations=sizes.blocks * _block(sizes) + sizes.tokens * _norm(sizes),
        # Log-softmax and two gradients of the logits in fp32; or, of few tokens, one of them
        # beside the gradient of the output layer.
        loss=max(3 * _logits(sizes), _logits(sizes) + sizes.table),
        one_block=0,
        sizes=sizes,
    )


def _block(sizes: Sizes) -> int:
    """What one block saves for backward."""
    attention = 2 * sizes.queries + 2 * sizes.keys  # Q, K, V and what comes out
    mlp = 4 * sizes.feed_forward  # gate, up, the activated gate, and the product
    if sizes.in_mlp < sizes.tokens:
        mlp = 0  # in tiles: backward makes them again
    of_heads = sizes.normed * (FP32 + sizes.element)  # their input in fp32, and that normalised
    return sizes.tokens * (2 * _norm(sizes) + of_heads + sizes.element * (attention + mlp))


def _norm(sizes: Sizes) -> int:
    """RMSNorm per token: its input in fp32, that normalised, and what comes out."""
    if sizes.norms_in_tiles:
        return sizes.hidden * 2 * sizes.element  # what goes in and out
    return sizes.hidden * (FP32 + 2 * sizes.element)


def _logits(sizes: Sizes) -> int:
    return FP32 * sizes.tokens * sizes.vocabulary


# --- what recipes change --------------------------------------------------------------------------


def with_eager_attention(step: StepBytes) -> StepBytes:
    """All scores [heads, S, S] after the softmax, and K and V copied for each head."""
    sizes = step.sizes
    copies = 2 * sizes.tokens * (sizes.queries - sizes.keys) * sizes.element
    return replace(step, activations=step.activations + sizes.blocks * (sizes.scores + copies))


def with_tiled_mlp(step: StepBytes, *, tile: int, norms: bool = False) -> StepBytes:
    """MLPs, and norms too, see `tile` tokens at a time and keep what they read. Checkpoints come
    after this."""
    sizes = step.sizes
    in_tiles = replace(sizes, in_mlp=min(tile, sizes.tokens), norms_in_tiles=norms)
    saved = sizes.blocks * (_block(sizes) - _block(in_tiles))
    return replace(step, activations=step.activations - saved, sizes=in_tiles)


def with_checkpointing(step: StepBytes, *, group: int = 1) -> StepBytes:
    """Of each block only its input [T, D] stays; of nested checkpoints, that of each group.

    Backward makes one block again and the gradients in it: of its output, of the gate and of the
    product. Nested checkpoints make the inputs of a group again, too.
    """
    sizes = step.sizes
    one = sizes.tokens * sizes.hidden * sizes.element  # input [T, D]
    outside = sizes.tokens * _norm(sizes)  # the last norm, free before a block is made again
    of_a_tile = sizes.element * sizes.in_mlp * 2 * sizes.feed_forward
    inside = _block(sizes) + one + of_a_tile
    if sizes.in_mlp < sizes.tokens:
        # The gradient of the input grows beside that of the output: with all of one tile, or when
        # the parts of all tiles are put together.
        inside += one + max(2 * of_a_tile, one - of_a_tile)
    if sizes.element == FP32:  # the first norm reads the input itself, and no copy in fp32
        inside -= one
    head = 0 if _frozen(step) else sizes.table  # its gradient is there by then
    groups = parts_needed(sizes.blocks, group)
    return replace(
        step,
        activations=groups * one + outside,
        one_block=(group - 1) * one + inside + head - outside,
    )


def with_inputs_elsewhere(step: StepBytes) -> StepBytes:
    """The inputs of checkpointed blocks wait on the host or on disk; that of the last block stays.

    This comes last. Nothing is left that backward uses up, so its highest moment is in the first
    block, beside the gradients of all others.
    """
    sizes = step.sizes
    one = sizes.tokens * sizes.hidden * sizes.element
    away = sizes.blocks - 1
    of_blocks = min(step.gradients, sizes.linears * sizes.element)
    return replace(
        step,
        activations=step.activations - away * one,
        one_block=step.one_block + of_blocks * away // sizes.blocks,
    )


def with_chunked_loss(step: StepBytes) -> StepBytes:
    """Not all logits: 64 MiB of those of a chunk and of their gradients; and the gradients of the
    output layer and of what it reads [T, D]. To that of a tied table the second half is added in
    place: there is one copy."""
    sizes = step.sizes
    of_hidden = 2 * sizes.tokens * sizes.hidden * sizes.element
    of_table = 0 if _frozen(step) else sizes.vocabulary * sizes.hidden * FP32
    loss = min(CHUNK, 2 * _logits(sizes)) + of_hidden + of_table
    return replace(step, loss=loss, copies=step.copies // 2)


def with_states_in(step: StepBytes, *, bits: int) -> StepBytes:
    """AdamW's averages in 16 bits, or in 8 bits but for those of the embedding."""
    sizes = step.sizes
    numbers = step.gradients // (FP32 if _frozen(step) else sizes.element)
    in_32_bits = 0
    if bits == 8 and not _frozen(step):
        in_32_bits = sizes.vocabulary * sizes.hidden
    of_one = (numbers - in_32_bits) * bits // 8 + in_32_bits * FP32
    return replace(step, states=ADAMW * of_one)


def with_step_in_backward(step: StepBytes) -> StepBytes:
    """A gradient is used at once. That of a tied table waits for its second half."""
    return replace(step, gradients=0)


def with_adapters(step: StepBytes, *, rank: int) -> StepBytes:
    """LoRA on all linear layers of the blocks, in fp32: r numbers for each end of each layer.

    A norm that does not train saves nothing to train it.
    """
    sizes = step.sizes
    adapters = FP32 * rank * sizes.ends
    spared = sizes.tokens * sizes.element * sizes.hidden * (2 * sizes.blocks + 2)
    return replace(
        step,
        weights=step.weights + adapters,
        gradients=adapters,
        states=ADAMW * adapters,
        copies=0,
        activations=step.activations - spared + sizes.blocks * _kept_by_adapters(sizes, rank),
        loss=3 * _logits(sizes),
    )


def with_adapters_made_again(step: StepBytes, *, rank: int) -> StepBytes:
    """Where blocks are checkpointed, what the adapters of one of them save. It comes after that."""
    return replace(step, one_block=step.one_block + _kept_by_adapters(step.sizes, rank))


def _kept_by_adapters(sizes: Sizes, rank: int) -> int:
    """What seven adapters of a block save: what is between their two matrices, and what they read.

    Four are in attention, three in the MLP.
    """
    in_attention = 4 * rank
    in_mlp = 3 * rank
    if sizes.element < FP32:  # what they read is there as a copy in fp32
        in_attention += sizes.hidden + sizes.queries
        in_mlp += sizes.hidden + sizes.feed_forward
    return FP32 * (sizes.tokens * in_attention + sizes.in_mlp * in_mlp)


def in_four_bits(step: StepBytes) -> StepBytes:
    """QLoRA's base: the linear layers of the blocks in NF4 with double quantization."""
    sizes = step.sizes
    packed = round(sizes.linears * NF4)
    return replace(
        step,
        weights=step.weights - sizes.linear_bytes + packed,
        sizes=replace(sizes, linear_bytes=packed),
    )


def sharded(step: StepBytes, *, ranks: int) -> StepBytes:
    """FSDP: a rank keeps its part of weights, gradients and states, and gathers block by block.

    In the backward of a block four of its size are there: the block, the next one, which arrives,
    and gradients, those that are made and those of the block before, on their way. The output layer
    is there twice: as it arrives and as it is put together; its gradient as made and as sent. One
    that is tied to the embedding is whole from forward to backward, and its gradient waits.
    """
    sizes = step.sizes
    block = sizes.linear_bytes // sizes.blocks
    logits = _logits(sizes)
    table = sizes.table
    tied = table if sizes.tied else 0
    head = table - tied  # gathered for the loss alone
    loss = max(
        2 * logits + 2 * head,  # the output layer has just arrived
        3 * logits + head,  # gradients of the loss
        logits + head + table + block,  # the gradient of the output layer, and a block that arrives
        2 * head + head // ranks + block,  # that gradient is sent
    )
    # Two blocks are done by then, unless one of them was made again.
    done = 0 if step.one_block else 2 * _block(sizes)
    blocks_at_once = 4
    # Made beside those of the first block, which are on their way; or on their way themselves.
    copies = tied + max(block + table + 2 * tied - table // ranks, 2 * table)
    if _frozen(step):  # no gradients but those of adapters
        blocks_at_once = 2
        copies = 0
        loss = max(2 * logits + 2 * head, 3 * logits + head)
    return replace(
        step,
        weights=step.weights // ranks,
        gradients=step.gradients // ranks,
        states=step.states // ranks,
        activations=step.activations + tied,
        loss=loss,
        one_block=step.one_block + blocks_at_once * block - done + tied,
        copies=copies,
    )


def _frozen(step: StepBytes) -> bool:
    """Whether adapters train, and not the weights of the model."""
    return step.gradients < step.weights // 2
