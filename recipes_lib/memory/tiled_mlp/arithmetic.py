"""What tiles save and what their backward holds, in bytes.

Backward goes through a block from its end to its beginning, and its largest moment may be in any
part of it:

    block      hidden -> norm -> attention -> (+) -> norm -> MLP in tiles -> (+) ->
    backward                 scores, projections     norm    tile by tile

Each is counted beside what the block saves (`one_block`), so it subtracts what is free by then.

Legend: S sequence, T tokens of a micro-batch, t of a tile, D hidden, F feed-forward, Q query and KV
key width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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


class Sizes(NamedTuple):
    """Bytes of the tensors that the formulas are made of."""

    TD: int
    tD: int
    TF: int
    tF: int
    tiles: int  # how many there are
    mlp_saves: int  # how many [T, F] an MLP saves without tiles
    norm_saves: int  # bytes that a norm of [T, D] saves, without this recipe ...
    norm_keeps: int  # ... and with it
    norm_in_fp32: int  # the six tensors of a whole RMSNorm's backward; 0 if norms are tiled
    norm_behind_mlp: bool  # Gemma 2, with four norms in a block
    head_saves: int  # the input of an output layer that trains


def tiled_budget(budget: Budget, model: Any, shape: Shape, *, tile: int, norms: bool) -> Budget:
    """The budget with tiles of `tile` tokens, and with or without tiled norms."""
    blocks = decoder_blocks(model)
    sizes = _sizes_of(budget, model, shape, tile=tile, norms=norms)
    of_a_norm = sizes.norm_saves - sizes.norm_keeps
    of_a_block = sizes.TF * sizes.mlp_saves + len(norms_of(blocks[0])) * of_a_norm
    tiled = budget.change(
        one_block=budget.one_block - of_a_block,
        activations=budget.activations - len(blocks) * of_a_block - of_a_norm,
        block_gradients=_in_one_block(budget, model, shape, sizes),
    )
    return _as_backward_begins(tiled, model, sizes)


def _sizes_of(budget: Budget, model: Any, shape: Shape, *, tile: int, norms: bool) -> Sizes:
    size = model.dtype.itemsize
    T = shape.tokens
    t = min(T, tile)
    D = model.config.hidden_size
    _, _, F = projection_widths(model.config)
    norm, *others = norms_of(decoder_blocks(model)[0])
    norm_saves = T * D * normalising_bytes(norm, model.config, size, base_frozen=budget.base_frozen)
    whole_rms_norms = not norms and not is_layer_norm(norm)
    return Sizes(
        TD=T * D * size,
        tD=t * D * size,
        TF=T * F * size,
        tF=t * F * size,
        tiles=-(-T // t),
        mlp_saves=saved_mlp_tensors(model),
        norm_saves=norm_saves,
        norm_keeps=T * D * size if norms else norm_saves,
        norm_in_fp32=6 * FP32 * T * D if whole_rms_norms else 0,
        norm_behind_mlp=len(others) == 3,
        head_saves=T * D * size if head_trains(budget, model) else 0,
    )


# --- moments of backward in a block ---------------------------------------------------------------


def _in_one_block(budget: Budget, model: Any, shape: Shape, sizes: Sizes) -> int:
    """Bytes at the largest moment of backward in a block, beside what the block has saved."""
    size = model.dtype.itemsize
    Q, KV, _ = projection_widths(model.config)
    largest = max(
        _while_the_mlp_runs(sizes, tile=_in_one_tile(budget, model, sizes)),
        _while_a_norm_runs(sizes),
        # Gradients of q, k, v and of the attention's output. The norm behind them is done.
        shape.tokens * (2 * Q + 2 * KV) * size - sizes.norm_keeps,
        _while_the_scores_run(budget, model, shape, sizes),
    )
    if any("rotary" in name for name, _ in model.named_modules()):
        # The cosines and sines [S, head_dim] of the positions are alive in all blocks.
        largest += 2 * shape.seq * size * Q // model.config.num_attention_heads
    return largest


def _while_the_mlp_runs(sizes: Sizes, *, tile: int) -> int:
    """Backward is in the tiles of the MLP, of which one takes `tile` bytes."""
    # The gradient of the MLP's output, and of its input: one part for each tile.
    gradients = 2 * sizes.TD
    if sizes.norm_behind_mlp:
        # The output's gradient is no longer that of the residual stream, which waits beside it.
        # What the norm behind the MLP has saved is free.
        gradients += sizes.TD - sizes.norm_keeps
    # The last tile, whose part of the input's gradient does not exist yet. Or, after it, the
    # input's gradient in one piece, as its parts are put together.
    return gradients + max(sizes.TD, tile - sizes.tD)


def _in_one_tile(budget: Budget, model: Any, sizes: Sizes) -> int:
    """Activations of one tile and their gradients, beside the sums of the weights' gradients."""
    # Adapters have smaller ones than the weights that they adapt: at most what a block has of the
    # gradients in the budget.
    blocks = decoder_blocks(model)
    trained = [tensor_bytes(p) for p in blocks[0].mlp.parameters() if p.requires_grad]
    all_sums = min(sum(trained), budget.gradients // len(blocks))
    largest_sum = min(max(trained, default=0), all_sums)

    # silu(gate) and up get their gradients: two [t, F] more than what the tile has saved. Then the
    # gradient of one weight arrives, and some of the activations are free.
    gated = (sizes.mlp_saves + 2) * sizes.tF
    added = (sizes.mlp_saves - 1) * sizes.tF + all_sums
    if sizes.tiles == 1:  # there is no sum yet
        return max(gated + largest_sum, added)
    # It is added to the sum so far: beside all sums, this tile's part and the new sum. Two
    # [t, F] wait to be multiplied.
    return max(gated + all_sums, added + 2 * largest_sum + 2 * sizes.tF)


def _while_a_norm_runs(sizes: Sizes) -> int:
    """Backward is in the norm in front of the MLP, or behind it, in one piece."""
    if not sizes.norm_in_fp32:
        return 0
    # Among its fp32 tensors is what the norm has saved: that is in the block's budget.
    in_the_norm = sizes.norm_in_fp32 - sizes.norm_keeps
    if sizes.norm_behind_mlp:
        in_the_norm += sizes.TD  # the gradient of the residual stream waits
    return in_the_norm


def _while_the_scores_run(budget: Budget, model: Any, shape: Shape, sizes: Sizes) -> int:
    """Gradients of the attention scores [heads, S, S]; 0 where other moments are larger."""
    plain = shape.tokens * block_gradient_bytes(model, seq=shape.seq)
    # A recipe before this one, such as flash attention, may have done away with the scores.
    largest = min(plain, budget.block_gradients)
    if largest <= sizes.TD + 2 * sizes.TF:
        return 0
    # For the scores, the plain formula has subtracted four [T, F] of the MLP, which are free by
    # then. In tiles there are none to subtract.
    return largest + 4 * sizes.TF


# --- the moment at which backward begins ----------------------------------------------------------


def _as_backward_begins(budget: Budget, model: Any, sizes: Sizes) -> Budget:
    """The budget, already with tiles in its blocks, with the right moment for a small loss.

    For this moment a budget adds to all activations the larger of the loss and a block's gradients.
    With a small loss that is too simple: backward comes through the final norm first, and in the
    last block the output layer's gradient is there as well. The difference, which may be negative,
    is added to the activations.
    """
    in_the_final_norm = 3 * sizes.TD
    if sizes.norm_in_fp32:  # what the output layer has saved is free
        in_the_final_norm = sizes.norm_in_fp32 - sizes.norm_keeps - sizes.head_saves
    head_gradient = 0
    if head_trains(budget, model):
        head_gradient = min(budget.gradients, tensor_bytes(head_of(model)))
    freed = sizes.norm_keeps + sizes.head_saves
    in_the_last_block = budget.block_gradients + head_gradient - freed
    largest = max(budget.loss, in_the_final_norm, in_the_last_block)
    return budget.change(activations=budget.activations + largest - budget.after_activations)
