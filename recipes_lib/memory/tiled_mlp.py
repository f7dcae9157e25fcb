"""Tiled MLP: the feed-forward layers see one tile of tokens at a time, in forward and in backward.

Problem    The widest tensors of a block are [T, F]: a gated MLP saves four, its backward adds two.
Idea       In an MLP no token reads another one, so they can pass in tiles, one after the other:

               forward    for x in tiles of h:    y = mlp(x)                    keep h [T, D]
               backward   for x in tiles of h:    mlp(x) again, dx, dW += …     six [t, F] at a time

           `norms=True` does the same to each RMSNorm, which saves its input twice: in fp32, and
           normalised.
Saves      4 T F elements in every block, and at the peak inside a block 6 (T - t) F. Of each norm
           that trains 4 bytes x T D, and the five fp32 tensors [T, D] that its backward adds.
Costs      The MLP's products once more, but for the last. On top of block checkpointing none, for
           that now ends its recomputation at the MLP's input (not in Gemma 2: a norm follows). A
           weight's gradient is summed over tiles, beside up to two copies of it; in bf16 every sum
           rounds, so more tiles mean a larger error. Dropout draws other numbers.
Use when   Sequences are long and the peak is inside a block: blocks are checkpointed, or few.
Not when   Logits or weights set the peak; in a mixture of experts, whose router's loss is over all
           tokens; under selective checkpointing, which keeps the products of all tiles.
In production   Axolotl `tiled_mlp: true`; DeepSpeed's `TiledMLP`
           (`runtime.sequence_parallel.ulysses_sp`); Liger `LigerTiledSwiGLUMLP`. A version that
           adds to `.grad` once per tile fails under plain DDP; this one does not.
Source     Bekman et al., Arctic Long Sequence Training, arXiv 2506.13996; Liu and Abbeel, arXiv
           2305.19370.

Shapes: B batch, S sequence, T = B*S tokens, t of a tile, D hidden, F feed-forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from recipes_lib.core.measure.dry_run import dry
from recipes_lib.core.model.causal_lm import (
    ROUTERS,
    decoder_blocks,
    leaf_names,
    norms_of,
    trunk,
)
from recipes_lib.core.model.mixins import mix_in
from recipes_lib.core.model.probe import proves
from recipes_lib.core.model.recomputed_parts import (
    needs_backward,
    refuse_selective_checkpointing,
    run_recomputed_parts,
)

EXPERTS = {"experts", "shared_expert", "shared_experts"}  # modules of a mixture of experts

# The fewest tokens of a tile by default. With fewer, the products of a tile take little time beside
# adding its part to the weights' gradients.
LEAST_TILE = 1024

# --- the idea: what a learner can copy ------------------------------------------------------------


def tiled_by_hand(mlp: nn.Module, hidden: torch.Tensor, *, tile_size: int) -> torch.Tensor:
    """`mlp(hidden)` for hidden [B, S, D], with the activations of one tile at a time."""
    tokens = hidden.flatten(0, -2)  # [T, D]: no token reads another one
    outputs = []
    for tile in tokens.split(tile_size):  # [t, D]
        outputs.append(checkpoint(mlp, tile, use_reentrant=False))  # [t, D]
    return torch.cat(outputs).view_as(hidden)


# --- the technique --------------------------------------------------------------------------------


@proves("exact", tried_with={"tile_size": 5})
def apply_tiled_mlp(model: Any, *, tile_size: int | None = None, norms: bool = False) -> Any:
    """Let the MLP of every block, and with `norms` every RMSNorm beside it, work in tiles.

    Returns `model`. Names and hooks of parameters, adapters, 4-bit layers and `copy.deepcopy` work
    as before.

    Args:
        tile_size: tokens of a tile, of all rows together. None takes the hidden size, with which
            the 6 t F elements are twice the MLP's own weights, but at least 1024.
    """
    if tile_size is None:
        tile_size = max(model.config.hidden_size, LEAST_TILE)
    for module in _token_wise_modules(model, norms):
        mix_in(module, Tiled, tile_size=tile_size)
    return model


class Tiled:
    """What is mixed into the class of an MLP or a norm: each token is treated by itself there."""

    tile_size: int

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the module does without tiles: [B, S, D] -> [B, S, D]."""
        tokens = hidden.reshape(1, -1, hidden.shape[-1])  # [1, T, D]
        whole_forward = super().forward

        dtypes = []  # of the outputs, which under autocast is not that of the input

        def tiles(tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tokens.split(_lengths(tokens.shape[1], self.tile_size), dim=1)  # [1, t, D]

        def of_tile(index: int, tile: torch.Tensor) -> torch.Tensor:
            if tile.shape[1] > self.tile_size:
                return _ManyTiles.apply(tile, dtypes[0])
            output = whole_forward(tile)
            dtypes.append(output.dtype)
            return output

        outputs = []
        if needs_backward(self, hidden):
            refuse_selective_checkpointing(parts="tiles", mixin=Tiled)
            # It is `tiled_by_hand`, made so that a checkpoint around the whole block costs no
            # third run.
            run_recomputed_parts(of_tile, tokens, split=tiles, take=outputs.append)
        else:
            outputs = [whole_forward(tile) for tile in tiles(tokens)]
        output = torch.cat(outputs, dim=1)  # [1, T, D]
        return output.view(*hidden.shape[:-1], output.shape[-1])


def _lengths(tokens: int, tile_size: int) -> list[int]:
    """Tokens of each tile.

    In a dry run, where time is per operator, all tiles between the first and the last two are one,
    that computes nothing. Backward begins with the last two, whose gradients of weights meet.
    """
    whole, rest = divmod(tokens, tile_size)
    lengths = [tile_size] * whole
    if rest:
        lengths.append(rest)
    if dry() and len(lengths) > 4:
        return [lengths[0], sum(lengths[1:-2]), *lengths[-2:]]
    return lengths


class _ManyTiles(torch.autograd.Function):
    """In a dry run: what many tiles leave behind, an output, and in backward a gradient."""

    @staticmethod
    def forward(ctx: Any, tiles: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = tiles.dtype
        return torch.empty_like(tiles, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.empty_like(gradient, dtype=ctx.dtype), None


def _token_wise_modules(model: Any, norms: bool) -> list[nn.Module]:
    """What works in tiles: the MLP of each block, and with `norms` the norms of the stream."""
    modules = []
    for block in decoder_blocks(model):
        if not hasattr(block, "mlp"):
            raise ValueError(f"{type(block).__name__} holds no MLP as `mlp`")
        # The weights of experts are often one tensor, [experts, D, F].
        has_experts = any(parameter.dim() > 2 for parameter in block.mlp.parameters())
        if has_experts or leaf_names(block.mlp) & (ROUTERS | EXPERTS):
            raise ValueError(
                f"{type(block.mlp).__name__} is a mixture of experts, whose router's loss is over "
                f"all tokens: only dense MLPs can be tiled"
            )
        modules.append(block.mlp)
    if not norms:
        return modules
    for owner in (trunk(model), *decoder_blocks(model)):
        modules += norms_of(owner)
    if any(isinstance(module, nn.LayerNorm) for module in modules):
        raise ValueError("a LayerNorm saves nothing but its input: pass norms=False")
    return modules
