"""Flash attention: exact attention that never stores the matrix of scores.

Problem    softmax(Q K^T) V keeps H scores for every pair of tokens: S^2 of them.
Idea       A block of queries meets the keys block by block, with a running maximum m, a running
           sum and a running output; in the end out / sum is the result:

               m'   = max(m, scores)
               sum' = sum * exp(m - m') + sum of exp(scores - m')
               out' = out * exp(m - m') + exp(scores - m') V
Saves      Per token and block, H * S scores and the repeated K and V; Q, K, V and the output stay.
           And the traffic of the scores to memory and back.
Costs      Sums come in another order: equal to rounding, not to the bit.
Use when   Always: most models have it by default, and `best_kernel` tells where they do not.
Not when   You want to look at the attention weights (`output_attentions`); scores are capped
           (Gemma 2) and there is no flash-attn, for SDPA has no cap.
In production   `from_pretrained(attn_implementation=…)`: "sdpa", "flash_attention_2" or
           "flash_attention_3".
Source     Dao et al., FlashAttention (arXiv 2205.14135); Dao, -2 (2307.08691); Shah et al., -3
           (2407.08608).

Traps: in fp32 on CUDA and before Ampere no fast kernel takes grouped KV heads, and the S^2 scores
would be back; so K and V are repeated. A padding mask is [B, 1, S, S], for which CUDA has no flash
kernel; padding on the right gets none, because no token reads what follows it.

Shapes: B batch, H heads, KV key and value heads, S sequence, E head dimension, C keys of one block.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recipes_lib.attention._unsupported import refuse_what_is_left_out, selects_keys
from recipes_lib.core.checks import check_choice
from recipes_lib.core.model.causal_lm import (
    decoder_blocks,
    projection_widths,
)
from recipes_lib.core.model.kernels_for_grouped_heads import without_grouped_heads
from recipes_lib.core.model.probe import proves

# --- the idea: what a learner can copy ------------------------------------------------------------


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax(Q K^T) V as eager models compute it, with all scores at once.

    q [B, H, S, E], k and v [B, KV, S, E] -> [B, S, H, E], as the output projection reads it.
    """
    groups = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(groups, dim=1)  # [B, H, S, E]
    v = v.repeat_interleave(groups, dim=1)  # [B, H, S, E]
    future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5  # [B, H, S, S]
    scores = scores.masked_fill(future, float("-inf"))
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)  # [B, H, S, S]
    return (weights @ v).transpose(1, 2)


def running_softmax_attention(q: Tensor, k: Tensor, v: Tensor, *, block_size: int) -> Tensor:
    """As a flash kernel does: the same result from blocks of scores [S, block_size], in turn.

    Written like this it teaches and saves nothing: autograd keeps the scores of every block.
    """
    groups = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(groups, dim=1)  # [B, H, S, E]
    v = v.repeat_interleave(groups, dim=1)  # [B, H, S, E]
    positions = torch.arange(q.shape[2], device=q.device)
    largest = q.new_full((*q.shape[:3], 1), float("-inf"))  # [B, H, S, 1], the running maximum
    total = q.new_zeros(*q.shape[:3], 1)  # [B, H, S, 1], the running sum
    out = torch.zeros_like(q)  # [B, H, S, E], the running output
    for keys in positions.split(block_size):
        scores = q @ k[:, :, keys].transpose(2, 3) / q.shape[3] ** 0.5  # [B, H, S, C]
        scores = scores.masked_fill(keys > positions[:, None], float("-inf"))
        new_largest = torch.maximum(largest, scores.amax(-1, keepdim=True))
        # What was summed so far was divided by exp(old maximum), and is now by exp(new maximum).
        correction = (largest - new_largest).exp()
        weights = (scores - new_largest).exp()  # [B, H, S, C]
        total = total * correction + weights.sum(-1, keepdim=True)
        out = out * correction + weights @ v[:, :, keys]
        largest = new_largest
    return (out / total).transpose(1, 2)


# --- the technique --------------------------------------------------------------------------------


@proves("exact", kernel=True, autocast="dtype")
def apply_flash_attention(
    model: Any, *, kernel: str = "auto", dtype: torch.dtype | None = None
) -> Any:
    """Put the best exact attention kernel for this machine under `model`, or the one you name.

    Args:
        kernel: "auto", or one of KERNELS.
        dtype: what attention computes in, by default the model's. Give torch.bfloat16 for training
            under autocast.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    check_choice(["auto", *KERNELS], kernel=kernel)
    now = model.config._attn_implementation
    if now not in ("eager", "sdpa", "flex_attention", *KERNELS):
        raise ValueError(
            f"the model's attention is {now!r}, which this would undo: apply flash attention first"
        )
    if kernel == "auto":
        kernel = best_kernel(model, dtype=dtype).implementation
    obstacle = _what_keeps_kernel(model, kernel, dtype)
    if obstacle:
        raise ValueError(f"{kernel} {obstacle}: kernel='auto' takes what can")
    # Ours are PyTorch's SDPA, in another order.
    for name in ("fused", "fused_cudnn"):
        AttentionInterface.register(name, fused_attention)
        AttentionMaskInterface.register(name, _mask_for_flash)
    model.set_attn_implementation(kernel)
    return model


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
    """Flash attention, as transformers calls it in every layer, by one of our two kernels."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    # On a CPU dropout leaves the flash kernel, and the S^2 scores are back.
    left_out = dropout if query.device.type == "cpu" else 0.0
    refuse_what_is_left_out("fused attention", options, dropout=left_out)
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


def _mask_for_flash(
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


# --- the choice of a kernel -----------------------------------------------------------------------


class Ability(NamedTuple):
    """What a kernel of attention can compute."""

    generations: range  # of CUDA devices: the first number of the compute capability; 0 is a CPU
    largest_head: int  # E
    extras: frozenset[str]  # "cap" on the scores, attention "dropout", "fp32"


# Names in transformers, best first. Ours contain neither "sdpa" nor "flash", because transformers
# takes such names for its own.
KERNELS: dict[str, Ability] = {
    "flash_attention_3": Ability(range(9, 10), 256, frozenset({"cap"})),
    # cuDNN's kernel: on Hopper about twice as fast as flash-attn 2.
    "fused_cudnn": Ability(range(9, 11), 128, frozenset({"dropout"})),
    "flash_attention_2": Ability(range(8, 13), 256, frozenset({"cap", "dropout"})),
    # SDPA, PyTorch's own choice of a kernel: it runs everywhere.
    "fused": Ability(range(100), 10**6, frozenset({"dropout", "fp32"})),
}


class Kernel(NamedTuple):
    """The kernel of attention that was chosen."""

    implementation: str  # its name in transformers
    why: str


def best_kernel(model: Any, *, dtype: torch.dtype | None = None) -> Kernel:
    """The kernel that `apply_flash_attention` takes, and why."""
    passed_over = []
    for name in KERNELS:
        obstacle = _what_keeps_kernel(model, name, dtype)
        if obstacle is None:
            reasons = [_kernel_in_words(model, name, dtype), *passed_over]
            return Kernel(name, "; ".join(reasons))
        passed_over.append(f"{name} {obstacle}")
    raise ValueError(
        f"{'; '.join(passed_over)}. "
        f"Take set_attn_implementation('eager') or, on CUDA, 'flex_attention'"
    )


def _what_keeps_kernel(model: Any, kernel: str, dtype: torch.dtype | None) -> str | None:
    """What keeps `kernel` from computing the attention of this model here; None if nothing does."""
    able = KERNELS[kernel]
    config = model.config.get_text_config()
    cap = getattr(config, "attn_logit_softcapping", None)
    drops = getattr(config, "attention_dropout", 0) or getattr(config, "attn_pdrop", 0)
    computes_in = dtype or model.dtype

    if selects_keys(model):
        return "would read all keys, not those that this model's indexer selects"
    if _cuda_generation(model.device) not in able.generations:
        return f"needs CUDA capability {able.generations[0]}.x"
    if _largest_head(model) > able.largest_head:
        return f"takes heads of {able.largest_head} at most"
    if computes_in.itemsize != 2 and "fp32" not in able.extras:
        return "computes in 16 bits"
    if cap is not None and "cap" not in able.extras:
        return f"cannot cap scores (attn_logit_softcapping={cap})"
    if drops and "dropout" not in able.extras:
        return "has no attention dropout"
    if not _is_kernel_installed(kernel):
        return "is not installed"
    if not _is_supported(model, kernel):
        return "is not supported by this model"
    return None


def _largest_head(model: Any) -> int:
    """The widest head, which a flash kernel has to take; layers may differ (Gemma 4)."""
    config = model.config.get_text_config()
    if getattr(config, "is_heterogeneous", False):
        modules = decoder_blocks(model).modules()
        return max(module.head_dim for module in modules if hasattr(module, "head_dim"))
    query_width, _, _ = projection_widths(config)
    return query_width // config.num_attention_heads


def _cuda_generation(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_capability(device)[0]


def _is_kernel_installed(kernel: str) -> bool:
    from transformers.utils import is_flash_attn_3_available, is_flash_attn_greater_or_equal

    if kernel == "flash_attention_3":
        return is_flash_attn_3_available()
    if kernel == "flash_attention_2":
        return is_flash_attn_greater_or_equal("2.6")  # the first that caps scores
    return True


def _is_supported(model: Any, kernel: str) -> bool:
    """Whether the model's code can use this kernel of attention at all."""
    if kernel.startswith("flash_attention"):
        return model._supports_flash_attn
    # Gemma 2 says that SDPA cannot compute it, and means its cap, which is judged apart.
    knows_cap = hasattr(model.config.get_text_config(), "attn_logit_softcapping")
    return model._supports_attention_backend and (model._supports_sdpa or knows_cap)


def _kernel_in_words(model: Any, kernel: str, dtype: torch.dtype | None) -> str:
    """A kernel of attention in words. For "fused" it is the one that PyTorch's SDPA will choose."""
    if kernel != "fused":
        return kernel.replace("_", " ")
    if model.device.type == "cpu":
        return "SDPA's flash kernel for CPUs"
    if not without_grouped_heads(model.device, dtype or model.dtype):
        return "SDPA's flash kernel"
    q, kv, _ = projection_widths(model.config.get_text_config())
    if kv == q:
        return "SDPA's memory-efficient kernel"
    return "SDPA's memory-efficient kernel with K and V repeated, because it takes no grouped heads"
