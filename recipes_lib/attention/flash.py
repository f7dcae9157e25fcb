"""Flash attention: exact attention that never stores the matrix of scores.

Problem    softmax(Q K^T) V keeps H scores for every pair of tokens: S^2 of them, written and read again and again.
Idea       A block of queries meets the keys block by block, with a running maximum m, sum and output:

               m' = max(m, scores)     sum' = sum * exp(m - m') + sum of exp(scores - m')     out' likewise, with V

           Backward makes each block of scores again from Q, K and the saved log of the sums.
Saves      Per token and block, H * S scores and the repeated K and V; Q, K, V and the output stay. And their traffic.
Costs      Sums come in another order: equal to rounding, not to the bit.
Use when   Always: most models have it by default, and `best_kernel` tells where they do not.
Not when   You want to look at the attention weights (`output_attentions`).
In production   `from_pretrained(attn_implementation=…)`: "sdpa", "flash_attention_2" or "flash_attention_3".
Source     Dao et al., FlashAttention (arXiv 2205.14135); Dao, -2 (2307.08691); Shah et al., -3 (2407.08608).

Traps, and what happens here. Capped scores (Gemma 2): SDPA has no cap and is refused. Grouped KV heads on CUDA,
in fp32 or before Ampere: no kernel takes them and the S^2 scores are back, so K and V are repeated. A padding mask is
[B, 1, S, S], for which CUDA has no flash kernel: padding on the right gets none, since no token reads what follows it.
Padding on the left, packed rows and a model's own window do get the mask; for them flash-attn is the remedy on CUDA.

Shapes: B batch, H heads, KV key and value heads, S sequence, E head dimension.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from recipes_lib.core.budget import Budget
from recipes_lib.core.causal_lm import projection_widths
from recipes_lib.core.measure import PeakMemory, in_turns
from recipes_lib.core.plain_step import budget_of, without_grouped_heads

# Names in transformers, best first, with the CUDA generations, the largest head and what else they can compute.
# Ours contain neither "sdpa" nor "flash", which transformers takes for its own.
KERNELS: dict[str, tuple[range, int, set[str]]] = {
    "flash_attention_3": (range(9, 10), 256, {"cap"}),
    "fused_cudnn": (
        range(9, 11),
        128,
        {"dropout"},
    ),  # on Hopper about twice as fast as flash-attn 2
    "flash_attention_2": (range(8, 13), 256, {"cap", "dropout"}),
    "fused": (range(100), 10**6, {"dropout", "fp32"}),  # SDPA, PyTorch's choice
}


class Kernel(NamedTuple):
    implementation: str  # its name in transformers
    why: str


class AttentionCost(NamedTuple):
    forward_seconds: float
    backward_seconds: float
    tflops: float  # of both passes together
    peak_bytes: int  # beside Q, K and V


def apply_flash_attention(
    model: Any, *, kernel: str = "auto", dtype: torch.dtype | None = None
) -> Any:
    """Put the best exact attention kernel for this machine under `model`, or the one of KERNELS that you name.

    `dtype` is what attention computes in, by default the model's: give torch.bfloat16 for training under autocast.
    Raises ValueError for a kernel that cannot run here or cannot compute this model, and for a model that has another
    technique's attention; in the forward for output_attentions and, on a CPU, attention dropout.
    """
    if kernel not in ("auto", *KERNELS):
        raise ValueError(f"kernel={kernel!r}: choose auto or one of {', '.join(KERNELS)}")
    if kernel != "auto" and (obstacle := _obstacles(model, dtype)[kernel]):
        raise ValueError(f"{kernel} {obstacle}: kernel='auto' takes what can")
    if (now := model.config._attn_implementation) not in (
        "eager",
        "sdpa",
        "flex_attention",
        *KERNELS,
    ):
        raise ValueError(
            f"the model's attention is {now!r}, which this would undo: apply flash attention first"
        )
    from transformers import AttentionInterface, AttentionMaskInterface

    for name in ("fused", "fused_cudnn"):
        AttentionInterface.register(name, _fused)
        AttentionMaskInterface.register(name, _mask)
    model.set_attn_implementation(
        best_kernel(model, dtype=dtype).implementation if kernel == "auto" else kernel
    )
    return model


def best_kernel(model: Any, *, dtype: torch.dtype | None = None) -> Kernel:
    """The kernel that `apply_flash_attention` takes, and why. Raises ValueError if none computes this model."""
    obstacles = _obstacles(model, dtype)
    passed = "; ".join(f"{name} {obstacle}" for name, obstacle in obstacles.items() if obstacle)
    name = next((name for name in KERNELS if not obstacles[name]), None)
    if name is None:
        raise ValueError(
            f"{passed}. Take set_attn_implementation('eager') or, on CUDA, 'flex_attention'"
        )
    q, kv, _ = projection_widths(model.config)
    sdpa = "SDPA's flash kernel" + " for CPUs" * (model.device.type == "cpu")
    if without_grouped_heads(model.device, dtype or model.dtype):
        sdpa = (
            "SDPA's memory-efficient kernel"
            + " with K and V repeated, because it takes no grouped heads" * (kv < q)
        )
    return Kernel(
        name, f"{sdpa if name == 'fused' else name.replace('_', ' ')}; {passed}".strip("; ")
    )


def _obstacles(model: Any, dtype: torch.dtype | None) -> dict[str, str | None]:
    """What keeps each kernel from computing this model here."""
    from transformers.utils import is_flash_attn_3_available, is_flash_attn_greater_or_equal

    config = model.config.get_text_config()
    major = torch.cuda.get_device_capability(model.device)[0] if model.device.type == "cuda" else 0
    head_dim = projection_widths(config)[0] // config.num_attention_heads
    cap = getattr(config, "attn_logit_softcapping", None)
    drops = getattr(config, "attention_dropout", 0) or getattr(config, "attn_pdrop", 0)
    known = model._supports_sdpa or hasattr(
        config, "attn_logit_softcapping"
    )  # of Gemma 2 only the cap is foreign
    known = known and model._supports_attention_backend
    from_2_6 = is_flash_attn_greater_or_equal("2.6")  # that caps scores
    installed = {"flash_attention_3": is_flash_attn_3_available(), "flash_attention_2": from_2_6}
    obstacles = {}
    for name, (generations, largest_head, able) in KERNELS.items():
        reasons = {
            f"needs CUDA capability {generations[0]}.x": major not in generations,
            f"takes heads of {largest_head} at most": head_dim > largest_head,
            "computes in 16 bits": "fp32" not in able and (dtype or model.dtype).itemsize != 2,
            f"cannot cap scores (attn_logit_softcapping={cap})": "cap" not in able
            and cap is not None,
            "has no attention dropout": "dropout" not in able and drops,
            "is not installed": not installed.get(name, True),
            "is not supported by this model": not (
                model._supports_flash_attn if name in installed else known
            ),
        }
        obstacles[name] = next((reason for reason, holds in reasons.items() if holds), None)
    return obstacles


def _fused(module, query, key, value, attention_mask, *, dropout=0.0, **options) -> Any:
    """What transformers calls: q [B, H, S, E], k and v [B, KV, S, E]."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    asked = options | {"dropout": (dropout and query.device.type == "cpu") or None}
    for name in ("softcap", "s_aux", "output_attentions", "dropout"):
        if asked.get(name) is not None and asked[name] is not False:
            raise ValueError(
                f"the fused kernels have no {name} here: set it to 0 or None, or take 'eager' attention"
            )
    cudnn, groups = (
        module.config._attn_implementation == "fused_cudnn",
        query.shape[1] // key.shape[1],
    )
    if groups > 1 and without_grouped_heads(value.device, value.dtype):
        key, value, module = (
            repeat_kv(key, groups),
            repeat_kv(value, groups),
            SimpleNamespace(is_causal=True),
        )
    first = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    with sdpa_kernel(first, set_priority=True) if cudnn else contextlib.nullcontext():
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, **options
        )


def _mask(*, q_length, kv_length, attention_mask=None, **options) -> Any:
    """What transformers calls for a mask: none if padding only follows text, otherwise SDPA's [B, 1, S, S]."""
    from transformers.masking_utils import sdpa_mask

    plain = (
        options.get("allow_is_causal_skip")
        and q_length == kv_length
        and not torch.compiler.is_compiling()
    )
    if (
        plain
        and attention_mask is not None
        and (attention_mask[:, 1:] <= attention_mask[:, :-1]).all()
    ):
        attention_mask = None
    return sdpa_mask(
        q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **options
    )


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal softmax(Q K^T) V as eager models compute it: q [B, H, S, E], k and v [B, KV, S, E] -> [B, S, H, E]."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(2, 3) / q.shape[3] ** 0.5).masked_fill(
        future, float("-inf")
    )  # [B, H, S, S]
    return (scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v).transpose(1, 2)


def measure_attention(
    model: Any, *, seq_len: int, eager: bool = True, rounds: int = 3
) -> dict[str, AttentionCost]:
    """Attention of one layer, [1, seq_len], in the model's shape, dtype and place: plain ("eager") and best kernel."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as registered

    kernel, (width, kv_width, _) = (
        best_kernel(model).implementation,
        projection_widths(model.config),
    )
    config, E = (
        SimpleNamespace(_attn_implementation=kernel),
        width // model.config.num_attention_heads,
    )
    module = SimpleNamespace(is_causal=True, num_key_value_groups=width // kv_width, config=config)
    shapes = [(1, seq_len, w // E, E) for w in (width, kv_width, kv_width)]
    qkv = [
        torch.randn(s, dtype=model.dtype, device=model.device).transpose(1, 2).requires_grad_()
        for s in shapes
    ]

    def step(name: str, backward: bool) -> None:
        out = (
            plain_attention(*qkv)
            if name == "eager"
            else registered.get(name, _fused)(module, *qkv, None)[0]
        )
        if backward:
            torch.autograd.grad(out.sum(), qkv)

    peaks = {}
    for name in ("eager",) * eager + (kernel,):  # the warm-up as well
        with PeakMemory() as memory:
            before = memory.current
            step(name, True)
        peaks[name] = memory.peak - before
    steps = {
        (name, both): functools.partial(step, name, both)
        for name in peaks
        for both in (False, True)
    }
    time = {key: statistics.median(times) for key, times in in_turns(steps, rounds=rounds).items()}
    tera = (
        3.5 * 2 * seq_len**2 * width / 1e12
    )  # operations: 4 S^2 H E / 2 (causal) forward, backward 2.5 times that
    return {
        name: AttentionCost(
            time[name, False], time[name, True] - time[name, False], tera / time[name, True], peak
        )
        for name, peak in peaks.items()
    }


def estimate_flash_attention(
    budget: Budget, model: Any, *, batch_size: int, seq_len: int
) -> Budget:
    """The budget with the best kernel, from the `budget` with the attention that `model` has now: let it be eager."""
    now, sizes = model.config._attn_implementation, {"batch_size": batch_size, "seq_len": seq_len}
    parts = ("activations", "one_block", "block_gradients")
    before = budget_of(model, **sizes)
    try:
        model.config._attn_implementation = best_kernel(model).implementation
        after = budget_of(model, **sizes)
    finally:
        model.config._attn_implementation = now
    return budget.change(
        **{p: getattr(budget, p) + getattr(after, p) - getattr(before, p) for p in parts}
    )
