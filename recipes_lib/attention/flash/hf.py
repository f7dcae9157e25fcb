"""What transformers calls in a model with one of the kernels of PyTorch's SDPA.

transformers looks two functions up by the name that `config._attn_implementation` holds: one makes
the mask, once per forward, and one computes attention, in every layer. Its own for "sdpa" are the
base of ours, which keep the fast kernels where transformers would leave them: see the traps in
flash.py.

Shapes: B batch, H heads, KV key and value heads, S sequence, E head dimension.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from recipes_lib.core.predict.plain_step import without_grouped_heads


def register() -> None:
    """Make our two kernels known to transformers: both are PyTorch's SDPA, in another order."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name in ("fused", "fused_cudnn"):
        AttentionInterface.register(name, fused_attention)
        AttentionMaskInterface.register(name, _mask)


def fused_attention(
    module: Any,
    query: Tensor,  # [B, H, S, E]
    key: Tensor,  # [B, KV, S, E]
    value: Tensor,  # [B, KV, S, E]
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    **options: Any,
) -> Any:
    """What transformers calls in every layer, in a model with one of our two kernels."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    _refuse_what_sdpa_ignores(query.device, dropout, options)
    order = contextlib.nullcontext()
    if module.config._attn_implementation == "fused_cudnn":
        # The first of these that can compute the call does.
        backends = [
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.MATH,
        ]
        order = sdpa_kernel(backends, set_priority=True)
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and without_grouped_heads(value.device, value.dtype):
        key = repeat_kv(key, groups)  # [B, H, S, E]
        value = repeat_kv(value, groups)  # [B, H, S, E]
        # A stand-in that does not name its groups, so that transformers does not treat them again.
        module = SimpleNamespace(is_causal=True)
    with order:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, **options
        )


def _refuse_what_sdpa_ignores(
    device: torch.device, dropout: float, options: dict[str, Any]
) -> None:
    asked = []
    for name in ("softcap", "s_aux", "indices", "output_attentions"):
        value = options.get(name)
        if value is not None and value is not False:
            asked.append(name)
    # On a CPU dropout leaves the flash kernel, and the S^2 scores are back.
    if dropout and device.type == "cpu":
        asked.append("dropout")
    if asked:
        raise ValueError(
            f"the fused kernels have no {asked[0]} here: "
            f"set it to 0 or None, or take 'eager' attention"
        )


def _mask(
    *, q_length: int, kv_length: int, attention_mask: Tensor | None = None, **options: Any
) -> Any:
    """What transformers calls for a mask: none if padding only follows text, else [B, 1, S, S]."""
    from transformers.masking_utils import sdpa_mask

    # A filled cache, a window or packed rows need their mask. While it compiles, nobody can look at
    # the values of another one.
    may_be_left_out = options.get("allow_is_causal_skip") and q_length == kv_length
    if may_be_left_out and attention_mask is not None and not torch.compiler.is_compiling():
        text_never_follows_padding = (attention_mask[:, 1:] <= attention_mask[:, :-1]).all()
        if text_never_follows_padding:
            attention_mask = None
    return sdpa_mask(
        q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **options
    )
