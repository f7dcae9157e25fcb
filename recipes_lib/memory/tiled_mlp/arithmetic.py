"""What tiles save and what their backward holds: the terms of `estimate_tiled_mlp`, in bytes.

Part of tiled_mlp. Backward goes through a block from its end to its beginning, and its largest
moment may be in any part of it:

    block      hidden -> norm -> attention -> (+) -> norm -> MLP in tiles -> (+) ->
    backward                 scores, projections     norm    tile by tile

`in_one_block` is the largest of these. It is counted beside what the block saves (`one_block`), so
a moment subtracts what is free again by then.

Legend: S sequence, T tokens of a micro-batch, t of a tile, D hidden, F feed-forward, Q query and KV
key width; `size` is the bytes of one element.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from recipes_lib.core.model.causal_lm import (
    decoder_blocks,
    is_layer_norm,
    norms_of,
    projection_widths,
)
from recipes_lib.core.model.sizes import tensor_bytes
from recipes_lib.core.predict.budget import Budget, Shape
from recipes_lib.core.predict.plain_step import (
    block_gradient_bytes,
    head_of,
    head_trains,
    normalising_bytes,
    saved_mlp_tensors,
)

FP32 = 4  # bytes of an element


@dataclass(frozen=True)
class Sizes:
    """The numbers that the formulas are made of."""

    S: int
    T: int
    t: int
    D: int
    F: int
    Q: int
    KV: int
    size: int
    # How many [T, F] an MLP saves without tiles.
    mlp_saves: int
    # Norms of the residual stream in a block: two, or four in Gemma 2.
    norms: int
    # Bytes per element of [T, D] that a norm saves without this recipe, and with it.
    norm_saves: int
    norm_keeps: int
    # Whether norms are RMSNorms that are not tiled: their backward makes fp32 [T, D].
    whole_rms_norms: bool
    # Bytes per element of [T, D] that a trained output layer saves: its input.
    head_saves: int

    @property
    def norm_behind_mlp(self) -> bool:
        """Gemma 2: a norm between the MLP and the residual stream. Its backward comes first."""
        return self.norms == 4


def sizes_of(budget: Budget, model: Any, shape: Shape, *, tile: int, norms: bool) -> Sizes:
    """Read off the model, for tiles of `tile` tokens and with or without tiled norms."""
    config = model.config
    size = model.dtype.itemsize
    query, key, feed_forward = projection_widths(config)
    norms_of_block = norms_of(decoder_blocks(model)[0])

    norm = norms_of_block[0]
    norm_saves = normalising_bytes(norm, config, size, base_frozen=budget.base_frozen)
    norm_keeps = norm_saves
    if norms:
        norm_keeps = size  # its input only
    head_saves = 0
    if head_trains(budget, model):
        head_saves = size
    return Sizes(
        S=shape.seq,
        T=shape.tokens,
        t=min(shape.tokens, tile),
        D=config.hidden_size,
        F=feed_forward,
        Q=query,
        KV=key,
        size=size,
        mlp_saves=saved_mlp_tensors(model),
        norms=len(norms_of_block),
        norm_saves=norm_saves,
        norm_keeps=norm_keeps,
        whole_rms_norms=not norms and not is_layer_norm(norm),
        head_saves=head_saves,
    )


# --- what is no longer saved ----------------------------------------------------------------------


def no_longer_saved_in_a_block(sizes: Sizes) -> int:
    """The [T, F] tensors of the MLP; and of each norm, if norms are tiled, all but its input."""
    mlp = sizes.T * sizes.F * sizes.mlp_saves * sizes.size
    return mlp + sizes.norms * no_longer_saved_in_a_norm(sizes)


def no_longer_saved_in_a_norm(sizes: Sizes) -> int:
    """What a norm saves beside its input: nothing changes if norms are not tiled."""
    return sizes.T * sizes.D * (sizes.norm_saves - sizes.norm_keeps)


# --- moments of backward in a block ---------------------------------------------------------------


def in_one_block(budget: Budget, model: Any, sizes: Sizes) -> int:
    """Bytes at the largest moment of backward in a block, beside what the block has saved."""
    largest = max(
        while_the_mlp_runs(sizes, tile=in_one_tile(budget, model, sizes)),
        while_a_norm_runs(sizes),
        while_the_projections_run(sizes),
        while_the_scores_run(budget, model, sizes),
    )
    return largest + rotary_bytes(model, sizes)


def while_the_mlp_runs(sizes: Sizes, *, tile: int) -> int:
    """Backward is in the tiles of the MLP, of which one takes `tile` bytes."""
    tensor = sizes.T * sizes.D * sizes.size  # one [T, D]
    # The gradient of the MLP's output, and of its input: one part for each tile.
    gradients = 2 * tensor
    if sizes.norm_behind_mlp:
        # The output's gradient is no longer that of the residual stream, which waits beside it.
        # What the norm behind the MLP has saved is free.
        gradients += tensor - sizes.T * sizes.D * sizes.norm_keeps
    # The last tile, whose part of the input's gradient does not exist yet. Or, after it, the
    # input's gradient in one piece, as its parts are put together.
    last_tile = tile - sizes.t * sizes.D * sizes.size
    return gradients + max(tensor, last_tile)


def in_one_tile(budget: Budget, model: Any, sizes: Sizes) -> int:
    """Activations of one tile and their gradients, beside the sums of the weights' gradients."""
    tensor = sizes.t * sizes.F * sizes.size  # one [t, F]
    all_sums, largest_sum = weight_gradients(budget, model)
    several_tiles = sizes.t < sizes.T

    # silu(gate) and up get their gradients: two [t, F] more than what the tile has saved. With
    # several tiles all sums exist. With one, only the gradient of the last weight does.
    activations = (sizes.mlp_saves + 2) * tensor
    if several_tiles:
        gated = activations + all_sums
    else:
        gated = activations + largest_sum

    # The gradient of one weight arrives, and some of the activations are free.
    added = (sizes.mlp_saves - 1) * tensor + all_sums
    if several_tiles:
        # It is added to the sum so far: beside all sums, this tile's part and the new sum. Two
        # [t, F] wait to be multiplied.
        added += 2 * largest_sum + 2 * tensor
    return max(gated, added)


def weight_gradients(budget: Budget, model: Any) -> tuple[int, int]:
    """Bytes of the gradients of an MLP's weights: of all of them, and of the largest.

    Adapters have smaller ones than the weights that they adapt: at most what a block has of the
    gradients in the budget.
    """
    blocks = decoder_blocks(model)
    trained = [tensor_bytes(p) for p in blocks[0].mlp.parameters() if p.requires_grad]
    of_all = min(sum(trained), budget.gradients // len(blocks))
    of_largest = min(max(trained, default=0), of_all)
    return of_all, of_largest


def while_a_norm_runs(sizes: Sizes) -> int:
    """Backward is in the norm in front of the MLP, or behind it, in one piece."""
    if not sizes.whole_rms_norms:
        return 0
    # Six fp32 tensors [T, D], among them what the norm has saved: that is in the block's budget.
    per_element = 6 * FP32 - sizes.norm_keeps
    if sizes.norm_behind_mlp:
        per_element += sizes.size  # the gradient of the residual stream waits
    return sizes.T * sizes.D * per_element


def while_the_projections_run(sizes: Sizes) -> int:
    """Gradients of q, k, v and of the attention's output. The norm behind them is done."""
    gradients = sizes.T * (2 * sizes.Q + 2 * sizes.KV) * sizes.size
    return gradients - sizes.T * sizes.D * sizes.norm_keeps


def while_the_scores_run(budget: Budget, model: Any, sizes: Sizes) -> int:
    """Gradients of the attention scores [heads, S, S]; 0 where other moments are larger."""
    plain = sizes.T * block_gradient_bytes(model, seq=sizes.S)
    # A recipe before this one, such as flash attention, may have done away with the scores.
    largest = min(plain, budget.block_gradients)
    in_plain_mlp = sizes.T * (sizes.D + 2 * sizes.F) * sizes.size
    if largest <= in_plain_mlp:
        return 0
    # For the scores, the plain formula has subtracted four [T, F] of the MLP, which are free by
    # then. In tiles there are none to subtract.
    return largest + 4 * sizes.T * sizes.F * sizes.size


def rotary_bytes(model: Any, sizes: Sizes) -> int:
    """The cosines and sines [S, head_dim] of the positions, which are alive in all blocks."""
    if not any("rotary" in name for name, _ in model.named_modules()):
        return 0
    return 2 * sizes.S * sizes.size * sizes.Q // model.config.num_attention_heads


# --- the moment at which backward begins ----------------------------------------------------------


def as_backward_begins(budget: Budget, model: Any, sizes: Sizes) -> Budget:
    """The budget, already with tiles in its blocks, with the right moment for a small loss.

    For this moment a budget adds to all activations the larger of the loss and a block's gradients.
    With a small loss that is too simple: backward comes through the final norm first, and in the
    last block the output layer's gradient is there as well. The difference, which may be negative,
    is added to the activations.
    """
    largest = max(
        budget.loss,
        while_the_final_norm_runs(sizes),
        while_the_last_block_runs(budget, model, sizes),
    )
    difference = largest - budget.after_activations
    return budget.change(activations=budget.activations + difference)


def while_the_final_norm_runs(sizes: Sizes) -> int:
    """Backward is in the norm behind the blocks. What the output layer has saved is free."""
    if not sizes.whole_rms_norms:
        return 3 * sizes.T * sizes.D * sizes.size
    return sizes.T * sizes.D * (6 * FP32 - sizes.norm_keeps - sizes.head_saves)


def while_the_last_block_runs(budget: Budget, model: Any, sizes: Sizes) -> int:
    """The block's largest moment beside the output layer's gradient, with the final norm done."""
    head_gradient = 0
    if head_trains(budget, model):
        head_gradient = min(budget.gradients, tensor_bytes(head_of(model)))
    freed = sizes.T * sizes.D * (sizes.norm_keeps + sizes.head_saves)
    return budget.block_gradients + head_gradient - freed
