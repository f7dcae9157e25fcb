"""Sliding window attention: each token reads the last W tokens, and others only layer by layer.

Problem    Causal attention computes S^2 / 2 scores per head: in long texts, most of a step's time.
Idea       Only a band of the matrix exists. A block of C queries shares the W + C keys that it can
           reach, and all blocks are the heads of one SDPA call:

               key       1 2 3 4 5 6 7 8      W = 4, C = 2
               query 6   - - x x x x          one block: it shares the keys 2 to 7
               query 7   - - - x x x x

           `sinks` keeps the first tokens of a text readable for all.
Saves      S^2 / 2 scores become S * (W + C), with C = W / 4: S / (2.5 W) times fewer. There is no
           [S, S] mask.
Costs      Another model: L layers see L * (W - 1) tokens back, so one trained with full attention
           must be tuned to it. A layer keeps one more copy of its output, and backward makes the
           gradients of K and V block by block, 1 + W / C times their size.
Use when   Texts are much longer than W, and most of what a token needs is near: code, logs, books.
Not when   S < 3 W; or the end of a text depends on its start: leave some layers full (`layers`), as
           Gemma does. Rows hold one text each, padded on the right.
In production   `sliding_window` in config.json (Mistral, Qwen, Gemma) with flash-attn;
           FlexAttention, here on CUDA.
Source     Longformer (arXiv 2004.05150); Mistral 7B (2310.06825); Xiao et al., attention sinks
           (2309.17453).

Trap: config.json does not keep the window. After from_pretrained apply it again.

Shapes: B batch, H heads of queries, KV heads of keys and values, S sequence, E head dimension.

banded  the kernel of the drawing, for any device
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._guards import active_fake_mode

from recipes_lib.attention._compiled_flex import compiled_block_mask, compiled_flex_attention
from recipes_lib.attention._unsupported import (
    refuse_other_scores,
    refuse_what_is_left_out,
    under_autocast,
)
from recipes_lib.attention.sliding_window.banded import band, banded_attention, block_length
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.core.model.kernels_for_grouped_heads import without_grouped_heads
from recipes_lib.core.model.one_document import require_one_document
from recipes_lib.core.model.probe import TOKENS, proves

NAME = "recipes_sliding_window"  # transformers takes "sdpa" or "flash" in a name for its own
# What a layer may be called that has this attention, and no mask of another kind.
KINDS = {"full_attention", "sliding_attention", "attention"}

# --- the idea: what a learner can copy ------------------------------------------------------------


def plain_sliding_window(q: Tensor, k: Tensor, v: Tensor, *, window: int, sinks: int = 0) -> Tensor:
    """Query by query, each against the keys that it reads: as slow as it is simple.

    q [B, H, S, E], k and v [B, KV, S, E] -> [B, H, S, E].
    """
    groups = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(groups, dim=1)  # [B, H, S, E]
    v = v.repeat_interleave(groups, dim=1)  # [B, H, S, E]
    outputs = []
    for i in range(q.shape[2]):
        reads = [j for j in range(i + 1) if j > i - window or j < sinks]
        query = q[:, :, i : i + 1]  # [B, H, 1, E]
        scores = query @ k[:, :, reads].transpose(2, 3) / q.shape[3] ** 0.5  # [B, H, 1, reads]
        outputs.append(scores.softmax(-1) @ v[:, :, reads])
    return torch.cat(outputs, dim=2)


# --- the technique --------------------------------------------------------------------------------


class Reach(NamedTuple):
    """How far a module with a window reads: its attribute `reach`, which a saved model has not."""

    window: int | None  # the last tokens; None for all
    sinks: int = 0  # the first tokens


def _as_wide_as_the_text(model: Any) -> dict[str, Any]:
    """Options under which nothing may change: layers with a window of their own keep it."""
    own = [_own_window(model, layer) for layer, _ in _causal_attentions(model)]
    full = [layer for layer, _ in _causal_attentions(model) if _own_window(model, layer) is None]
    if full:
        return {"window": TOKENS, "sinks": 0, "layers": full}
    return {"window": min(own), "sinks": 0, "layers": None}


@proves(
    "exact",
    tried_with=_as_wide_as_the_text,
    narrow={"window": 2, "sinks": 0, "layers": None},
    kernel=True,
)
def apply_sliding_window(
    model: Any, *, window: int, sinks: int = 0, layers: Iterable[int] | None = None
) -> Any:
    """Let the blocks `layers` (None: all) read the last `window` tokens and the first `sinks`.

    Other blocks keep full causal attention, or the window that the model has, on PyTorch's SDPA.
    Apply it after what else sets the attention; a second call replaces the first, and
    `model.set_attn_implementation("sdpa")` takes it off. Returns `model`, each of whose attention
    modules now has the attribute `reach`.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    _refuse_other_masks(model)
    refuse_other_scores(model)
    attentions = _causal_attentions(model)
    known = {layer for layer, _ in attentions}
    chosen = known if layers is None else set(layers)
    if not chosen or not chosen <= known:
        raise ValueError(f"layers={sorted(chosen)}: give some of {sorted(known)}, or None for all")
    for layer, attention in attentions:
        own = _own_window(model, layer)
        attention.reach = Reach(own)
        if layer in chosen:
            if own is not None and (window > own or sinks):
                raise ValueError(
                    f"window={window}, sinks={sinks}: "
                    f"layer {layer} takes its own {own} at most, and no sinks"
                )
            attention.reach = Reach(window, sinks)
    AttentionInterface.register(NAME, _windowed_attention)
    AttentionMaskInterface.register(NAME, _no_mask_for_window)
    model.set_attn_implementation(NAME)
    require_one_document(model)
    return model


def sliding_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    sinks: int = 0,
    scale: float | None = None,
) -> Tensor:
    """Token i reads i - window + 1 … i and the first `sinks`.

    q [B, H, S, E], k and v [B, KV, S, E] -> [B, H, S, E].

    `scale` is that of the scores, by default 1 / sqrt(E).
    """
    q, k, v = under_autocast(q, k, v)
    # A window over the whole text is plain causal attention: there the banded kernel makes one
    # SDPA call.
    if _flex_is_fast(q.device) and window < q.shape[2]:
        flex = _window_by_flex(q.shape[2], window, sinks, q.device, active_fake_mode())
        return flex(q, k, v, scale=scale, enable_gqa=True)
    if without_grouped_heads(q.device, q.dtype):
        groups = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(groups, dim=1)  # [B, H, S, E]
        v = v.repeat_interleave(groups, dim=1)  # [B, H, S, E]
    return banded_attention(q, k, v, window=window, sinks=sinks, scale=scale)


def _flex_is_fast(device: torch.device) -> bool:
    """Whether FlexAttention is fast for a window: compiled here, with good kernels (Ampere)."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return find_spec("triton") is not None


# Kept, because every layer and every step asks for the same mask. `dry_run` is part of the key: a
# dry run needs a mask of its own, without data.
@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)
def _window_by_flex(
    length: int, window: int, sinks: int, device: torch.device, dry_run: Any
) -> Callable[..., Tensor]:
    """FlexAttention under a window and its `sinks`, for texts of one length."""

    def reads_in_window(batch, head, query, key):
        return (key <= query) & ((key > query - window) | (key < sinks))

    mask = compiled_block_mask(reads_in_window, None, None, length, length, device=device)
    return functools.partial(compiled_flex_attention, block_mask=mask)


# --- what transformers sees of it -----------------------------------------------------------------


def _causal_attentions(model: Any) -> list[tuple[int, nn.Module]]:
    """The attention modules that can have a window, each with the number of its block."""
    found = []
    for layer, block in enumerate(decoder_blocks(model)):
        causal = [module for module in block.modules() if getattr(module, "is_causal", False)]
        found += [(layer, module) for module in causal]
    return found


def _refuse_other_masks(model: Any) -> None:
    """Raise ValueError for masks beside a window that a few tokens do not show: of chunks."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    for layer, _ in _causal_attentions(model):
        if kinds and kinds[layer] not in KINDS:
            raise ValueError(f"layer {layer} is {kinds[layer]}, which has a mask of its own")


def _own_window(model: Any, layer: int) -> int | None:
    """The window that a layer has from the model itself; None if it reads all."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds and kinds[layer] != "sliding_attention":
        return None
    of_the_model = getattr(config, "sliding_window", None)
    [attention, *_] = [module for number, module in _causal_attentions(model) if number == layer]
    return getattr(attention, "sliding_window", of_the_model)


def _windowed_attention(
    module: nn.Module,
    query: Tensor,  # [B, H, Q, E], the new tokens
    key: Tensor,  # [B, KV, S, E], all tokens
    value: Tensor,  # [B, KV, S, E]
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention in a window, as transformers calls it in every layer -> [B, Q, H, E]."""
    if not hasattr(module, "reach"):  # only the configuration was copied from another model
        raise ValueError(
            "this model has the attention of a sliding window and no window: call "
            "apply_sliding_window(model, window=...), or model.set_attn_implementation('sdpa')"
        )
    if attention_mask is not None:
        raise ValueError("sliding window attention takes no mask [S, S]: give one of [B, S]")
    refuse_what_is_left_out("sliding window attention", options, "position_bias", dropout=dropout)
    queries = query.shape[2]
    keys = key.shape[2]
    window = module.reach.window or keys
    sinks = module.reach.sinks
    if queries == keys:
        out = sliding_window_attention(query, key, value, window=window, sinks=sinks, scale=scaling)
    else:  # tokens after those in a KV cache: the last rows of the matrix
        reads = band(queries, keys, window, sinks, query.device)  # [Q, S]
        out = F.scaled_dot_product_attention(
            query, key, value, reads, scale=scaling, enable_gqa=True
        )
    return out.transpose(1, 2).contiguous(), None


def _no_mask_for_window(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int,
    kv_offset: int,
    attention_mask: Tensor | None,
    allow_is_causal_skip: bool,
    **_: Any,
) -> None:
    """What transformers calls instead of making a mask [S, S]: there is none.

    Padding on the right is read by padding only.
    """
    left_padding = False
    if attention_mask is not None:
        left_padding = (attention_mask[:, 1:] > attention_mask[:, :-1]).any()
    # transformers forbids to leave the mask out where rows are packed, or the model adds one of its
    # own. While torch.compile traces, it cannot look, and forbids it for all rows.
    packed = not allow_is_causal_skip and not torch.compiler.is_compiling()
    # A static cache has keys behind the last query.
    static_cache = q_offset + q_length != kv_offset + kv_length
    if left_padding or packed or static_cache:
        raise ValueError(
            "left padding, packed rows or a static cache: "
            "give one text per row, padded on the right"
        )


# --- the arithmetic -------------------------------------------------------------------------------


def predicted_speedup(*, seq_len: int, window: int) -> float:
    """How many times fewer scores a window has than full attention: S / (2.5 W) in the limit."""
    block = block_length(window, 0)
    blocks, rest = divmod(max(0, seq_len - window), block)
    causal_head = min(seq_len, window) ** 2 / 2
    in_blocks = blocks * block * (window + block)
    in_rest = rest * (window + rest)
    full = seq_len**2 / 2
    return full / (causal_head + in_blocks + in_rest)
