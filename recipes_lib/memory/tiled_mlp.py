"""Tiled MLP: the feed-forward layers see one tile of tokens at a time, in forward and again in backward.

Problem    The widest tensors of a block are [T, F]: a gated MLP saves four, and its backward adds two.
Idea       In an MLP no token reads another one, so the tokens can pass in tiles, one after the other:

               forward    for x in tiles of h:    y = mlp(x)                    keep h [T, D] and no [t, F]
               backward   for x in tiles of h:    mlp(x) again, dx, dW += …     six [t, F] at a time

           `norms=True` does the same to each RMSNorm, which saves its input in fp32 and once more normalised.
Saves      4 T F elements in every block, and at the peak inside a block 6 (T - t) F. norms: 4 bytes x T D for
           each norm whose weight trains, and the five fp32 [T, D] that its backward adds.
Costs      The MLP's products once more, but for the last; on top of block checkpointing none, for that now ends its
           recomputation at the MLP's input (not in Gemma 2: a norm follows). A weight's gradient is summed over tiles,
           beside up to two copies of it; in bf16 every sum rounds (0.3 % error plain, 1.3 % in 128 tiles). Dropout
           draws other numbers.
Use when   Sequences are long and the peak is inside a block: blocks are checkpointed, or few.
Not when   Logits or weights set the peak. Selective checkpointing keeps the products of all tiles: the forward refuses.
In production   Axolotl `tiled_mlp: true`; DeepSpeed's `TiledMLP` (`runtime.sequence_parallel.ulysses_sp`); Liger
           `LigerTiledSwiGLUMLP`. A version that adds to `.grad` once per tile fails under plain DDP; this one does not.
Source     Bekman et al., Arctic Long Sequence Training, arXiv 2506.13996; Liu and Abbeel, arXiv 2305.19370.

Shapes: B batch, S sequence, T = B*S tokens, t of a tile, D hidden, F feed-forward, Q query and KV key width.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from recipes_lib.core.budget import Budget
from recipes_lib.core.causal_lm import decoder_blocks, norms_of, projection_widths
from recipes_lib.core.plain_step import budget_of, final_norm_bytes
from recipes_lib.core.sizes import tensor_bytes

ROUTERS = {
    "gate",
    "router",
    "experts",
    "shared_expert",
    "shared_experts",
}  # of a mixture of experts


def apply_tiled_mlp(model: Any, *, tile_size: int | None = None, norms: bool = False) -> Any:
    """Let the MLP of every block, and with `norms` every RMSNorm beside it, work in tiles. Returns `model`.

    Names and hooks of parameters, adapters, 4-bit layers, `isinstance` and `copy.deepcopy` work as before.

    Args:
        tile_size: tokens of all rows together. None: the hidden size (6 t F are then twice the MLP's own weights), but
            at least 1024, beside whose products the sum of the weights' gradients is short.
    Raises ValueError for a tile size below 1; an `mlp` that is missing, a mixture of experts or reads more than the
    hidden states; `norms` where they are LayerNorms; and a model that is tiled already.
    """
    size, modules = _size(model, tile_size), _token_wise(model, norms)
    if any(isinstance(module, _Tiled) for module in modules):
        raise ValueError("this model is tiled already: call remove_tiled_mlp(model) first")
    for (
        module
    ) in modules:  # a subclass rather than a new `forward` on the module: a deep copy gets its own
        module.__class__, module.tile_size = _tiled_class(type(module)), size
    return model


def remove_tiled_mlp(model: Any) -> Any:
    """Give every module its own class back. Raises ValueError if there is nothing to remove."""
    modules = [module for module in model.modules() if isinstance(module, _Tiled)]
    if not modules:
        raise ValueError("this model has no module that apply_tiled_mlp() has changed")
    for module in modules:
        module.__class__ = type(module).__bases__[1]
        del module.tile_size
    return model


class _Tiled:
    """What is mixed into the class of an MLP or a norm: of anything that treats each token by itself."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # [B, S, D]
        module, tokens = super().forward, hidden.reshape(1, -1, hidden.shape[-1])  # [1, T, D]
        if torch.is_grad_enabled() and any(x.requires_grad for x in (hidden, *self.parameters())):
            parts = _checkpointed_tiles(module, tokens, self.tile_size)
        else:
            parts = [module(tile) for tile in tokens.split(self.tile_size, dim=1)]
        return torch.cat(parts, dim=1).view(*hidden.shape[:-1], parts[0].shape[-1])


def _checkpointed_tiles(module: Any, tokens: torch.Tensor, size: int) -> list[torch.Tensor]:
    if any(
        "CachingTorchDispatchMode" in type(mode).__name__
        for mode in _get_current_dispatch_mode_stack()
    ):
        raise ValueError(
            "selective checkpointing keeps what the products of all tiles return, so that tiles save nothing: "
            "checkpoint whole blocks, or call remove_tiled_mlp(model)"
        )
    empty = tokens.new_empty(
        0, requires_grad=True
    )  # tells `checkpoint` the device whose random state it restores
    tokens = _Saved.apply(tokens, empty, size)
    tiles, node = [*tokens.split(size, dim=1)], tokens.grad_fn
    # A checkpoint around all this recomputes until it has what was saved: let it see the input and nothing later.
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        parts = [
            checkpoint(_run, empty, module, tiles, node, i, use_reentrant=False)
            for i in range(len(tiles))
        ]
    tiles.clear()  # the checkpoints of the tiles hold this list, and must not hold the input
    return parts


def _run(
    empty: torch.Tensor, module: Any, tiles: list[torch.Tensor], node: Any, index: int
) -> torch.Tensor:
    if not tiles and not node.tiles:  # backward enters the last tile
        (tokens,) = node.saved_tensors
        node.tiles = [tile.detach().requires_grad_() for tile in tokens.split(node.size, dim=1)]
    return module((tiles or node.tiles)[index])


class _Saved(torch.autograd.Function):
    """The identity, which saves the input once for all tiles."""

    @staticmethod
    def forward(ctx, tokens, empty, size):
        ctx.save_for_backward(tokens)
        ctx.size, ctx.tiles = size, None
        return tokens

    @staticmethod
    def backward(ctx, gradient):
        ctx.tiles = None
        return gradient, None, None


@functools.cache
def _tiled_class(module_class: type) -> type:
    # The name stays: FSDP and device maps find modules by it.
    return type(
        module_class.__name__, (_Tiled, module_class), {"__module__": module_class.__module__}
    )


def _token_wise(model: Any, norms: bool) -> list[torch.nn.Module]:
    blocks = decoder_blocks(model)
    modules = [getattr(block, "mlp", None) for block in blocks]
    if norms:
        trunk = next(
            module
            for module in model.modules()
            if any(child is blocks for child in module.children())
        )
        modules += (found := [norm for owner in (trunk, *blocks) for norm in norms_of(owner)])
        if not found or any(isinstance(norm, torch.nn.LayerNorm) for norm in found):
            raise ValueError(
                "norms=True is for RMSNorm; a LayerNorm saves nothing but its input: pass norms=False"
            )
    for module in modules:
        if reason := _why_not(module):
            raise ValueError(f"{type(module).__name__} in {type(blocks[0]).__name__} {reason}")
    return modules


def _why_not(module: torch.nn.Module | None) -> str | None:
    if module is None:
        return "is all that is found: a block has to hold its MLP as `mlp`"
    names = {name.rpartition(".")[2] for name, _ in module.named_modules()}
    if names & ROUTERS or any(parameter.dim() > 2 for parameter in module.parameters()):
        return "is a mixture of experts, whose router may look at all tokens: only dense MLPs can be tiled"
    if "forward" in vars(module):
        return (
            "has a forward of its own (of a device map or a kernel library): no tile would ever run"
        )
    inputs = inspect.signature(module.forward).parameters.values()
    if sum(x.default is x.empty and x.kind is x.POSITIONAL_OR_KEYWORD for x in inputs) != 1:
        return f"reads more than the hidden states: {', '.join(map(str, inputs))}"
    return None


def _size(model: Any, tile_size: int | None) -> int:
    if tile_size is not None and tile_size < 1:
        raise ValueError(f"tile_size={tile_size}: give 1 or more tokens, or None for the default")
    return tile_size or max(model.config.hidden_size, 1024)


def estimate_tiled_mlp(
    budget: Budget,
    model: Any,
    *,
    batch_size: int,
    seq_len: int,
    tile_size: int | None = None,
    norms: bool = False,
) -> Budget:
    """Estimate it after what changes batch, attention, loss, precision or adapters, and before checkpointing.

    The peak inside a block is that of a tile, a norm or attention. What adapters save in the MLP is not subtracted.
    """
    _token_wise(model, norms)
    plain, blocks = budget_of(model, batch_size=batch_size, seq_len=seq_len), decoder_blocks(model)
    T, D, size = batch_size * seq_len, model.config.hidden_size, model.dtype.itemsize
    (Q, KV, F), t, norm = (
        projection_widths(model.config),
        min(T, _size(model, tile_size)),
        norms_of(blocks[0]),
    )
    head = model.get_output_embeddings().weight
    read = size * head.requires_grad  # bytes per element that the head saves
    inner = final_norm_bytes(model) // D - read  # … that a norm saves, beside its output
    kept, rms = size if norms else inner, not norms and not isinstance(norm[0], torch.nn.LayerNorm)
    saved = (
        4 if any("gate_proj" in name for name, _ in blocks[0].named_modules()) else 5
    )  # [T, F] in an MLP
    one_block = budget.one_block - T * (saved * size * F + len(norm) * D * (inner - kept))
    activations = (
        budget.activations - len(blocks) * (budget.one_block - one_block) - T * D * (inner - kept)
    )

    weights = [tensor_bytes(p) for p in blocks[0].mlp.parameters() if p.requires_grad] or [0]
    sums = min(
        sum(weights), budget.gradients // len(blocks)
    )  # of adapters: less than of what they adapt
    one, many, wide = min(max(weights), sums), t < T, size * t * F
    # As silu(gate) and up get their gradients, or as the gradient of one weight is added to the sum so far.
    tile = max(
        (saved + 2) * wide + (sums if many else one),
        (saved - 1) * wide + sums + 2 * many * (wide + one),
    )
    behind = len(norm) == 4  # Gemma 2: a norm behind the MLP, whose backward comes first
    scores = min(plain.block_gradients, budget.block_gradients)
    inside = max(
        # Gradients of the MLP's output and of its input, which in the end are put together.
        T * D * (2 * size + behind * (size - kept)) + max(T * D * size, tile - t * D * size),
        T * D * (24 - kept + behind * size) * rms,  # six fp32 tensors in the backward of a norm
        T * (size * (2 * Q + 2 * KV) - D * kept),  # gradients of q, k, v and the attention's output
        (scores + 4 * T * size * F) * (scores > T * size * (D + 2 * F)),  # … of [heads, S, S]
    )
    if any("rotary" in name for name, _ in model.named_modules()):
        inside += (
            2 * seq_len * size * Q // model.config.num_attention_heads
        )  # cos and sin: alive all the time
    # With a small loss: the peak in the final norm's backward, or in the last block's, beside the head's gradient.
    last = (
        inside
        + min(budget.gradients, tensor_bytes(head) * head.requires_grad)
        - T * D * (kept + read)
    )
    activations += max(budget.loss, T * D * (24 - kept - read if rms else 3 * size), last) - max(
        budget.loss, inside
    )
    return budget.change(activations=activations, one_block=one_block, block_gradients=inside)
