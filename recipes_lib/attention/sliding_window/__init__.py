"""Sliding window attention: each token reads the last W tokens, and others only layer by layer.

Problem    Causal attention computes S^2 / 2 scores per head: in long texts, most of a step's time.
Idea       Only a band of the matrix exists. A block of C queries shares the W + C keys that it can
           reach:

               key       1 2 3 4 5 6 7 8      W = 4, C = 2
               query 6   - - x x x x          one block: it shares the keys 2 to 7
               query 7   - - - x x x x

           The keys of a block are a view into K, and all blocks have the same small mask
           [C, W + C]. So one SDPA call takes the blocks as the heads of a batch. The first W
           tokens are one small causal call. `sinks` keeps the first tokens of a text readable for
           all.
Saves      S^2 / 2 scores become S * (W + C), with C = W / 4: S / (2.5 W) times fewer. There is no
           [S, S] mask.
Costs      Another model: L layers see L * (W - 1) tokens back, so one trained with full attention
           must be tuned to it. config.json does not keep the window: after from_pretrained apply it
           again. A layer keeps one more copy of its output, and backward makes the gradients of K
           and V block by block, 1 + W / C times their size.
Use when   Texts are much longer than W, and most of what a token needs is near: code, logs, books.
Not when   S < 3 W; or the end of a text depends on its start: leave some layers full (`layers`), as
           Gemma does.
In production   `sliding_window` in config.json (Mistral, Qwen, Gemma) with flash-attn;
           FlexAttention, here on CUDA.
Source     Longformer (arXiv 2004.05150); Mistral 7B (2310.06825); Xiao et al., attention sinks
           (2309.17453).

The kernel of the drawing is in banded.py, what transformers calls in
hf.py.

Shapes: B batch, H heads of queries, KV heads of keys and values, S sequence, E head dimension.

banded  its kernel for any device
hf  what transformers calls for it
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch._guards import active_fake_mode

from recipes_lib.attention._compiled_flex import compiled_block_mask, compiled_flex_attention
from recipes_lib.attention.sliding_window.banded import banded_attention, block_length
from recipes_lib.core.checks import check_heads, check_number, check_whole
from recipes_lib.core.model.causal_lm import require_causal_lm
from recipes_lib.core.predict.plain_step import without_grouped_heads

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


def apply_sliding_window(
    model: Any, *, window: int, sinks: int = 0, layers: Iterable[int] | None = None
) -> Any:
    """Let the blocks `layers` (None: all) read the last `window` tokens and the first `sinks`.

    Other blocks keep full causal attention, or the window that the model has, on PyTorch's SDPA.
    Apply it after what else sets the attention; a second call replaces the first, and
    `model.set_attn_implementation("sdpa")` takes it off. Returns `model`, each of whose attention
    modules now has the attribute `reach`: how far it reads (see hf.py).
    Raises ValueError for a window below 1 or beyond the layer's own, an unknown layer, capped
    scores, blocks without attention; in the forward for left padding, packed rows, a static KV
    cache, attention dropout, output_attentions.
    """
    # Here, because it imports this file.
    from recipes_lib.attention.sliding_window.hf import attentions_of, reach_of_layers, register

    require_causal_lm(model)
    check_whole(window=window)
    check_whole(sinks=sinks, least=0)
    attentions = attentions_of(model)
    reaches = reach_of_layers(model, attentions, window=window, sinks=sinks, layers=layers)
    # From here on nothing is refused any more: the model changes.
    for attention, reach in zip(attentions, reaches):
        attention.reach = reach
    model.set_attn_implementation(register())
    return model


def sliding_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    sinks: int = 0,
    scale: float | None = None,
    kernel: str = "auto",
) -> Tensor:
    """Token i reads i - window + 1 … i and the first `sinks`.

    q [B, H, S, E], k and v [B, KV, S, E] -> [B, H, S, E].

    Args:
        scale: of the scores, by default 1 / sqrt(E).
        kernel: "banded" runs anywhere, "flex" needs CUDA, "auto" takes "flex" from Ampere on.
    Raises ValueError for shapes that do not belong together, a window below 1, an unknown kernel.
    """
    check_whole(window=window)
    check_whole(sinks=sinks, least=0)
    if scale is not None:
        check_number(scale=scale)
    check_heads(q, k, v, allowed="[B, H, S, E] and twice [B, KV, S, E], with H a multiple of KV")
    if kernel not in ("auto", "banded", "flex") or (kernel == "flex" and not q.is_cuda):
        raise ValueError(
            f"kernel={kernel!r} on {q.device.type}: choose auto, banded or, on CUDA, flex"
        )
    # Rotary embeddings leave q and k in fp32, beside a v in 16 bits.
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q = q.to(dtype)
        k = k.to(dtype)
        v = v.to(dtype)

    if kernel == "auto":
        kernel = "flex" if _flex_is_fast(q.device) else "banded"
    # A window over the whole text is plain causal attention: there the banded kernel makes one
    # SDPA call.
    if kernel == "flex" and window < q.shape[2]:
        flex = _flex(q.shape[2], window, sinks, q.device, active_fake_mode())
        return flex(q, k, v, scale=scale, enable_gqa=True)
    if without_grouped_heads(q.device, q.dtype):
        groups = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(groups, dim=1)  # [B, H, S, E]
        v = v.repeat_interleave(groups, dim=1)  # [B, H, S, E]
    return banded_attention(q, k, v, window=window, sinks=sinks, scale=scale)


def _flex_is_fast(device: torch.device) -> bool:
    """Whether FlexAttention is compiled here, and has good kernels: from Ampere on."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return find_spec("triton") is not None


# Kept, because every layer and every step asks for the same mask. `dry_run` is part of the key: a
# dry run needs a mask of its own, without data.
@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)
def _flex(
    length: int, window: int, sinks: int, device: torch.device, dry_run: Any
) -> Callable[..., Tensor]:
    """PyTorch's FlexAttention with the mask of this band."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def reads(batch, head, query, key):
        return (key <= query) & ((key > query - window) | (key < sinks))

    # On CUDA both are compiled, because otherwise both make [S, S].
    make_mask = create_block_mask
    attend = flex_attention
    if device.type == "cuda":
        make_mask = compiled_block_mask
        attend = compiled_flex_attention
    mask = make_mask(reads, None, None, length, length, device=device)
    return functools.partial(attend, block_mask=mask)


# --- the arithmetic -------------------------------------------------------------------------------


def predicted_speedup(*, seq_len: int, window: int) -> float:
    """How many times fewer scores than full causal attention computes: S / (2.5 W) in the limit.

    Raises ValueError for a length or a window below 1.
    """
    check_whole(seq_len=seq_len, window=window)
    block = block_length(window, 0)
    blocks, rest = divmod(max(0, seq_len - window), block)
    causal_head = min(seq_len, window) ** 2 / 2
    in_blocks = blocks * block * (window + block)
    in_rest = rest * (window + rest)
    full = seq_len**2 / 2
    return full / (causal_head + in_blocks + in_rest)
