"""Hugging Face glue of the decode loop: layers as it wants them, and a comparison of logits.

Whatever has layers of the names of Llama's is read. Whether it computes what the loop computes, the
logits of a few tokens say. What shows only on long texts is asked of the configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from recipes_lib.core.model.causal_lm import decoder_blocks, longest_text, trunk
from recipes_lib.core.model.evaluating import evaluating
from recipes_lib.inference.decode_loop.norms import HeadNorm, RootMeanSquareNorm

# Kinds of rotary embeddings whose angles per position are the same for all lengths.
FIXED_ROPE = ("default", "linear", "yarn", "llama3")

WAY_OUT = "the decode loop does not compute that; keep model.generate() for this model"
PROBE_TOKENS = 8
# Relative errors of logits: what the order of sums makes of them, and room for it.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


# --- what is read ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """What a block of the decode loop has to know beside its weights."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # of the scores, most often 1 / sqrt(head_dim)
    sharpening: float  # YaRN's: a factor of the rotated queries and keys
    window: int | None  # how many tokens attention looks back; None for all
    positions: int | None  # for which the model was trained; None if nothing says so


def sizes_of(model: Any) -> Sizes:
    """For the decode loop: the sizes of a model that has the layers of Llama."""
    config = model.config
    attention = decoder_blocks(model)[0].self_attn
    return Sizes(
        heads=attention.q_proj.out_features // attention.head_dim,
        kv_heads=attention.k_proj.out_features // attention.head_dim,
        head_dim=attention.head_dim,
        scale=attention.scaling,
        sharpening=trunk(model).rotary_emb.attention_scaling,
        window=_window_of_decoder(config),
        positions=longest_text(config),
    )


def _window_of_decoder(config: Any) -> int | None:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and "sliding_attention" not in kinds:
        return None
    return getattr(config, "sliding_window", None)


def in_pairs(linear: nn.Linear, sizes: Sizes) -> nn.Linear:
    """A copy for the decode loop with the rows of each head as 0, E/2, 1, E/2 + 1, …

    transformers rotates dimension i with i + E/2. Side by side they are one complex number. Scores
    are sums over the dimensions, so the same order in queries and keys leaves them as they are.
    """
    bias = None
    if linear.bias is not None:
        bias = _interleaved(linear.bias, sizes.head_dim)
    return _linear_of_decode_loop(_interleaved(linear.weight, sizes.head_dim), bias)


def _interleaved(rows: Tensor, head_dim: int) -> Tensor:
    """For the decode loop: [H * E, …] -> the same shape, the halves of each head alternate."""
    halves = rows.detach().view(-1, 2, head_dim // 2, *rows.shape[1:])  # [H, 2, E/2, …]
    return halves.transpose(1, 2).reshape(rows.shape)


def head_norm(attention: nn.Module, sizes: Sizes) -> HeadNorm | None:
    """For the decode loop: norms of queries and of keys as one; None for a family without them."""
    if not hasattr(attention, "q_norm"):
        return None
    q = _interleaved(attention.q_norm.weight, sizes.head_dim)  # [E]
    k = _interleaved(attention.k_norm.weight, sizes.head_dim)
    weight = torch.cat([q.expand(sizes.heads, -1), k.expand(sizes.kv_heads, -1)])  # [Hq + Hkv, E]
    return HeadNorm(weight, attention.q_norm.variance_epsilon)


def stacked(*parts: nn.Linear) -> nn.Linear:
    """For the decode loop: one linear layer with the outputs of the parts, one after the other."""
    bias = None
    if parts[0].bias is not None:
        bias = torch.cat([part.bias for part in parts])
    return _linear_of_decode_loop(torch.cat([part.weight for part in parts]), bias)


def linear_on_same_memory(linear: nn.Linear) -> nn.Linear:
    """For the decode loop: a linear layer on the same memory, with parameters of its own."""
    return _linear_of_decode_loop(linear.weight, linear.bias)


def _linear_of_decode_loop(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    outputs, inputs = weight.shape
    # "meta" takes no memory for the weights that are replaced at once.
    linear = nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    linear.weight = _frozen_for_decoding(weight)
    if bias is not None:
        linear.bias = _frozen_for_decoding(bias)
    return linear


def norm_like(norm: nn.Module) -> RootMeanSquareNorm:
    """For the decode loop: the same norm with few operators, and a weight of its own."""
    return RootMeanSquareNorm(norm.weight, norm.variance_epsilon)


def activation_of(act_fn: nn.Module) -> Callable[[Tensor], Tensor]:
    """For the decode loop: the activation as a function, without the call of a module around it."""
    if isinstance(act_fn, nn.SiLU) or type(act_fn).__name__ == "SiLUActivation":
        return functional.silu
    return act_fn


def _frozen_for_decoding(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach(), requires_grad=False)


# --- does it compute the same? --------------------------------------------------------------------


def require_the_same_at_any_length(model: Any) -> None:
    """For the decode loop: raise ValueError for angles that change with the length, and for caps.

    A cap of the scores changes nothing as long as they are small.
    """
    config = model.config.get_text_config()
    kind = getattr(getattr(trunk(model), "rotary_emb", None), "rope_type", "default")
    if kind not in FIXED_ROPE or getattr(config, "attn_logit_softcapping", None) is not None:
        raise ValueError(
            f"{type(model).__name__} caps its scores, or has rotary angles of kind {kind}, which "
            f"change with the length: {WAY_OUT}"
        )


def decoder_with_equal_logits(model: Any, decoder_class: Callable[[Any], Any]) -> Any:
    """A decode loop of the weights of `model`, with the same logits."""
    try:
        decoder = decoder_class(model)
        error, allowed = error_of_logits(model, decoder)
    except Exception as error:  # the first thing that is not as in Llama, in the words of Python
        problem = " ".join(str(error).split())[:100]
        raise ValueError(
            f"{type(model).__name__} differs from Llama ({problem}): {WAY_OUT}"
        ) from error
    if not error <= allowed:  # NaN is not
        raise ValueError(
            f"{type(model).__name__} gives other logits than the decode loop (relative error "
            f"{error:.2g}, allowed {allowed:g}): {WAY_OUT}"
        )
    return decoder


@torch.no_grad()
def error_of_logits(model: Any, decoder: Any) -> tuple[float, float]:
    """How far a decode loop's logits are from those of `model`, and how far they may be."""
    spread = torch.linspace(0, decoder.vocabulary - 1, PROBE_TOKENS)
    tokens = spread.long()[None].to(model.device)  # [1, S]
    with evaluating(model):
        expected = model(tokens, use_cache=False).logits.float()  # [1, S, V]

    cache = decoder.new_cache(max_tokens=PROBE_TOKENS)
    together, single = tokens.split([PROBE_TOKENS - 2, 2], dim=1)
    got = [decoder(together, cache)]
    got += [decoder(token, cache) for token in single.split(1, dim=1)]
    difference = (torch.cat(got, dim=1).float() - expected).norm()
    return (difference / expected.norm()).item(), TOLERANCE[model.dtype]
