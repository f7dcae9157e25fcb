"""Sliding window attention: each token reads the last W tokens; what lies further back reaches it layer by layer.

Problem    Causal attention computes S^2 / 2 scores per head: from some length on, that is most of a step's time.
Idea       Only a band of the matrix exists. A block of C queries shares the W + C keys that it can reach:

               key       1 2 3 4 5 6 7 8         W = 4, C = 2: block by block, the keys are a view into K,
               query 6   - - x x x x             and all blocks have the same small mask [C, W + C],
               query 7   - - - x x x x           so one SDPA call takes them as the heads of a batch
           The first W tokens are one small causal call. `sinks` keeps the first tokens of a text readable for all.
Saves      S^2 / 2 scores become S * (W + C), with C = W / 4: S / (2.5 W) times fewer. There is no [S, S] mask.
Costs      Another model: L layers see L * (W - 1) tokens back, so one trained with full attention must be tuned to it.
           config.json does not keep the window: after from_pretrained apply it again. A layer keeps one more copy of
           its output, and backward makes the gradients of K and V block by block, 1 + W / C times their size.
Use when   Texts are much longer than W, and most of what a token needs is near: code, logs, books.
Not when   S < 3 W; or the end of a text depends on its start: leave some layers full (`layers`), as Gemma does.
In production   `sliding_window` in config.json (Mistral, Qwen, Gemma) with flash-attn; FlexAttention, here on CUDA.
Source     Longformer (arXiv 2004.05150); Mistral 7B (2310.06825); Xiao et al., attention sinks (2309.17453).

Shapes: B batch, H heads, KV key and value heads, G = H / KV, S sequence, E head dimension, N blocks of C queries.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._guards import active_fake_mode

from recipes_lib.core.causal_lm import decoder_blocks
from recipes_lib.core.plain_step import without_grouped_heads

NAME = "recipes_sliding_window"  # transformers takes "sdpa" or "flash" in a name for its own


def apply_sliding_window(
    model: Any, *, window: int, sinks: int = 0, layers: Iterable[int] | None = None
) -> Any:
    """Let the blocks `layers` (None: all) read the last `window` tokens and the first `sinks`. Returns `model`.

    Other blocks keep full causal attention, or the window that the model has, on PyTorch's SDPA. Apply it after what
    else sets the attention; a second call replaces the first, `model.set_attn_implementation("sdpa")` takes it off.
    Raises ValueError for a window below 1 or beyond the layer's own, an unknown layer, capped scores, blocks without
    attention; in the forward for left padding, packed rows, a static KV cache, attention dropout, output_attentions.
    """
    _check(window, sinks)
    blocks, config = decoder_blocks(model), model.config.get_text_config()
    chosen = set(range(len(blocks)) if layers is None else layers)
    if not chosen or not chosen <= set(range(len(blocks))):
        raise ValueError(
            f"layers={sorted(chosen)}: give indices from 0 to {len(blocks) - 1}, or None for all"
        )
    attentions = [
        [module for module in block.modules() if getattr(module, "is_causal", False)]
        for block in blocks
    ]
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * len(blocks)  # all alike
    known = set(kinds) <= {"full_attention", "sliding_attention"} and all(
        len(found) == 1 for found in attentions
    )
    if not known or not model._supports_attention_backend:
        raise ValueError(
            f"{type(model).__name__}: every block needs one attention, causal and looked up by its name"
        )
    if (cap := getattr(config, "attn_logit_softcapping", None)) is not None:
        raise ValueError(
            f"attn_logit_softcapping={cap}: SDPA caps no scores; keep this model's attention, or cap=None"
        )
    reach = []
    for layer, ((attention,), kind) in enumerate(zip(attentions, kinds)):
        own = getattr(attention, "sliding_window", getattr(config, "sliding_window", None))
        own = own if kind == "sliding_attention" else None
        if layer in chosen and own is not None and (window > own or sinks):
            raise ValueError(
                f"window={window}, sinks={sinks}: layer {layer} takes its own {own} at most, and no sinks"
            )
        reach.append((window, sinks) if layer in chosen else (own, 0))
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _no_mask)
    for (attention,), attention_reach in zip(attentions, reach):
        attention.reach = attention_reach
    model.set_attn_implementation(NAME)
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
    """Token i reads i - window + 1 … i and the first `sinks`. q [B, H, S, E], k and v [B, KV, S, E] -> [B, H, S, E].

    `kernel`: "banded" runs anywhere, "flex" is for CUDA, "auto" takes "flex" on GPUs from Ampere on. Raises ValueError
    for shapes that do not belong together, a window below 1 and an unknown kernel.
    """
    _check(window, sinks)
    if (
        q.dim() != 4
        or k.shape != v.shape
        or q[:, :1].shape != k[:, :1].shape
        or q.shape[1] % k.shape[1]
    ):
        raise ValueError(
            f"q {[*q.shape]}, k {[*k.shape]}, v {[*v.shape]}: give [B, H, S, E] and twice [B, KV, S, E]"
        )
    if kernel not in ("auto", "banded", "flex") or (kernel == "flex" and not q.is_cuda):
        raise ValueError(
            f"kernel={kernel!r} on {q.device.type}: choose auto, banded or, on CUDA, flex"
        )
    if torch.is_autocast_enabled(
        q.device.type
    ):  # rotary embeddings leave q and k in fp32 beside a v in 16 bits
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    ampere = q.is_cuda and torch.cuda.get_device_capability(q.device) >= (8, 0)
    if window < q.shape[2] and (
        kernel == "flex" or (kernel == "auto" and ampere and find_spec("triton"))
    ):
        return _flex(q.shape[2], window, sinks, q.device, active_fake_mode())(
            q, k, v, scale=scale, enable_gqa=True
        )
    if without_grouped_heads(q.device, q.dtype):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return _banded(q, k, v, window, sinks, scale)


def _banded(
    q: Tensor, k: Tensor, v: Tensor, window: int, sinks: int, scale: float | None
) -> Tensor:
    length, k, v, step = q.shape[2], k.contiguous(), v.contiguous(), _step(window, sinks)
    head = min(length, window + sinks)  # the windows of all later tokens lie behind the sinks
    rest = (length - head) % step
    first, *later = q.split([head, length - head - rest, rest], dim=2)
    mask = _band(head, head, window, sinks, q.device) if head > window else None
    # Copies: what the kernel saves of a view would keep the whole tensor.
    first = [x.contiguous() for x in (first, k[:, :, :head], v[:, :, :head])]
    gqa = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        *first, mask, is_causal=mask is None, scale=scale, enable_gqa=gqa
    )
    pieces = [out.transpose(1, 2)]  # [B, …, H, E], as the output projection reads it
    blocks = zip(later, (head, length - rest), (step, rest))
    pieces += [
        _blocks(part, k, v, start, size, window, sinks, scale)
        for part, start, size in blocks
        if part.numel()
    ]
    return (torch.cat(pieces, dim=1) if len(pieces) > 1 else pieces[0]).transpose(1, 2)


def _step(window: int, sinks: int) -> int:
    return max(
        64, window if sinks else window // 4
    )  # few waste few scores, under 64 leave tiles empty


def _blocks(
    q: Tensor, k: Tensor, v: Tensor, start: int, step: int, window: int, sinks: int, scale: Any
) -> Tensor:
    """The queries from `start` on, in blocks: [B, N*C, H, E]. The heads of a group stand below each other, G*C rows."""
    (B, H, length), KV, N = q.shape[:3], k.shape[1], q.shape[2] // step
    q = q.unflatten(2, (N, step)).unflatten(1, (KV, H // KV))  # [B, KV, G, N, C, E]
    q = q.transpose(2, 3).flatten(3, 4).flatten(0, 1)  # [B*KV, N, G*C, E]

    def windows(x: Tensor) -> Tensor:  # [B*KV, N, sinks + W + C, E]
        near = (
            x[:, :, start - window : start + length]
            .flatten(0, 1)
            .unfold(1, window + step, step)
            .transpose(2, 3)
        )
        return (
            torch.cat([x[:, :, None, :sinks].expand(-1, -1, N, -1, -1).flatten(0, 1), near], 2)
            if sinks
            else near
        )

    bias = _block_bias(step, window, sinks, H // KV, q.dtype, q.device, active_fake_mode())
    out = F.scaled_dot_product_attention(q, windows(k), windows(v), bias, scale=scale)
    out = out.unflatten(2, (H // KV, step)).unflatten(0, (B, KV))  # [B, KV, N, G, C, E]
    return out.permute(0, 2, 4, 1, 3, 5).flatten(3, 4).flatten(1, 2)


def _band(queries: int, keys: int, window: int, sinks: int, device: torch.device) -> Tensor:
    """True where a query reads: [queries, keys], the last query at the last key."""
    key = torch.arange(keys, device=device)
    query = torch.arange(keys - queries, keys, device=device)[:, None]
    return (key <= query) & ((key > query - window) | (key < sinks))


@functools.lru_cache(
    maxsize=2
)  # every layer saves it for backward: the same one; one without data in a dry run
@torch.inference_mode(False)
def _block_bias(
    step: int, window: int, sinks: int, groups: int, dtype: Any, device: Any, dry_run: Any
) -> Tensor:
    reads = F.pad(_band(step, window + step, window, 0, device), (sinks, 0), value=True).repeat(
        groups, 1
    )
    return torch.zeros(reads.shape, dtype=dtype, device=device).masked_fill_(~reads, float("-inf"))


@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)
def _flex(length: int, window: int, sinks: int, device: torch.device, dry_run: Any) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def reads(batch, head, query, key):
        return (key <= query) & ((key > query - window) | (key < sinks))

    cuda = device.type == "cuda"  # compiled, because otherwise both make [S, S]
    mask = create_block_mask(reads, None, None, length, length, device=device, _compile=cuda)
    return functools.partial(
        torch.compile(flex_attention) if cuda else flex_attention, block_mask=mask
    )


def _attention(module, query, key, value, mask, *, dropout=0.0, scaling=None, **options) -> Any:
    """What transformers calls: Q new tokens [B, H, Q, E] against all of them [B, KV, S, E]."""
    options |= {"a mask [S, S]": mask, "dropout": dropout or None}
    for name in (
        "a mask [S, S]",
        "dropout",
        "output_attentions",
        "softcap",
        "s_aux",
        "position_bias",
    ):
        if options.get(name) is not None and options[name] is not False:
            raise ValueError(
                f"sliding window attention takes no {name}: set it to 0 or None in the model"
            )
    at = options.get("position_ids") if module.layer_idx == 0 and not active_fake_mode() else None
    if (
        at is not None and (at.diff() != 1).any()
    ):  # transformers sees it only without a cache and a mask
        raise ValueError(
            "positions restart, as in packed rows: give one text per row, padded on the right"
        )
    queries, keys = query.shape[2], key.shape[2]
    window, sinks = module.reach[0] or keys, module.reach[1]
    if queries == keys:
        out = sliding_window_attention(query, key, value, window=window, sinks=sinks, scale=scaling)
    else:  # tokens after those in a KV cache: some rows of the matrix
        band = _band(queries, keys, window, sinks, query.device)
        out = F.scaled_dot_product_attention(
            query, key, value, band, scale=scaling, enable_gqa=True
        )
    return out.transpose(1, 2).contiguous(), None


def _no_mask(
    *, q_length, kv_length, q_offset, kv_offset, attention_mask, allow_is_causal_skip, **_
) -> None:
    """What transformers calls instead of making [S, S]. Padding on the right is read by padding only."""
    left = attention_mask is not None and (attention_mask[:, 1:] > attention_mask[:, :-1]).any()
    if left or not allow_is_causal_skip or q_offset + q_length != kv_offset + kv_length:
        raise ValueError(
            "left padding, packed rows or a static cache: give one text per row, padded on the right"
        )


def _check(window: int, sinks: int) -> None:
    if window < 1 or sinks < 0 or isinstance(window, float):
        raise ValueError(
            f"window={window}, sinks={sinks}: whole numbers, a window of 1 or more, 0 or more sinks"
        )


def estimate_sliding_window(*, seq_len: int, window: int) -> float:
    """How many times fewer scores than full causal attention computes: S / (2.5 W) in the limit."""
    _check(min(seq_len, window), 0)
    step = _step(window, 0)
    blocks, rest = divmod(max(0, seq_len - window), step)
    scores = (
        min(seq_len, window) ** 2 / 2 + blocks * step * (window + step) + rest * (window + rest)
    )
    return seq_len**2 / 2 / scores
