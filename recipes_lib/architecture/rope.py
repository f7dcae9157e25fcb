"""Rotary position embeddings, and how to stretch them: a trained model reads texts longer than those it was trained on.

Problem    Rotary embeddings turn queries and keys by an angle per position. Beyond the trained length come angles
           that the model has never seen, and attention breaks down.
Idea       angle(position, i) = position * base ** (-2i / head_dim)      i: pair of dimensions

               linear    position / factor        all frequencies slower: nearby words blur (position interpolation)
               dynamic   a larger base, only when the text is longer than the training was (NTK)
               yarn      slow the low frequencies only, those that never turned whole; sharpen the softmax a little
Saves      Training on long texts: the trained length times `factor`, with little or no fine-tuning.
Costs      linear and yarn change short texts too, because the factor is fixed. dynamic recomputes the frequencies as
           a text grows, and keys that are cached already keep the old ones.
Use when   Texts are longer than `max_position_embeddings`.
Not when   They are not: for Qwen3 its authors advise to leave YaRN off until it is needed.
In production   `"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}` in
           config.json; vLLM `--hf-overrides` with the same.
Source     Su et al., "RoFormer" (arXiv 2104.09864); Chen et al., "Position Interpolation" (arXiv 2306.15595); Peng et
           al., "YaRN" (arXiv 2309.00071); bloc97, "NTK-Aware Scaled RoPE" (2023).

`apply_rope_scaling` writes the configuration, from which transformers computes the same frequencies as
`rope_frequencies` here; `rotate` is the formula itself.

Shapes: B batch, H heads, S sequence, E head dimension.
"""

from __future__ import annotations

import math
from typing import Any

import torch

KINDS = ("linear", "dynamic", "yarn")
FAST_TURNS, SLOW_TURNS = (
    32,
    1,
)  # YaRN: pairs that turn more often than 32 times stay, less often than once are slowed


def apply_rope_scaling(model: Any, *, kind: str, factor: float) -> Any:
    """Scale the rotary embedding of `model` in place, for texts up to `factor` times its trained length.

    The configuration changes with it, so that `save_pretrained` keeps the scaling.
    Raises ValueError for another kind, factor <= 1, and a model without one rotary embedding for all of its layers.
    """
    if kind not in KINDS or factor <= 1:
        raise ValueError(
            f"kind={kind!r}, factor={factor}: choose one of {', '.join(KINDS)}, and a factor above 1"
        )
    causal = getattr(model, "get_base_model", lambda: model)()  # without adapters
    config, rotary = causal.config, getattr(causal.base_model, "rotary_emb", None)
    known = getattr(config, "rope_parameters", None) or {}
    if rotary is None or "rope_type" not in known:
        raise ValueError(
            f"{type(model).__name__} has no single rotary embedding to scale: it cannot be stretched here"
        )
    if known["rope_type"] != "default":
        raise ValueError(
            f"the model is scaled already ({known['rope_type']}): load the original configuration"
        )
    config.rope_parameters = dict(known) | {
        "rope_type": kind,
        "factor": float(factor),
        "original_max_position_embeddings": config.max_position_embeddings,
    }
    if (
        kind != "dynamic"
    ):  # dynamic compares the text with the trained length, which therefore stays
        config.max_position_embeddings = int(config.max_position_embeddings * factor)
    causal.base_model.rotary_emb = type(rotary)(config=config).to(rotary.inv_freq.device)
    return model


def rope_frequencies(
    head_dim: int,
    *,
    base: float,
    kind: str = "default",
    factor: float = 1.0,
    trained: int = 0,
    seq_len: int = 0,
) -> tuple[torch.Tensor, float]:
    """Radians per position of each pair of dimensions, fp32 [E/2], and what YaRN multiplies queries and keys by.

    Args:
        base: `rope_theta`, 10,000 or more.
        trained: positions that the model was trained on, for dynamic and yarn. seq_len: of the text, for dynamic.
    Raises ValueError for an odd head_dim and an unknown kind, and where `trained` is needed and missing.
    """
    if (
        head_dim % 2
        or kind not in ("default", *KINDS)
        or (kind in ("dynamic", "yarn") and trained < 1)
    ):
        raise ValueError(
            f"head_dim={head_dim}, kind={kind!r}, trained={trained}: give an even head_dim, one of default, "
            f"{', '.join(KINDS)}, and for dynamic and yarn the trained length"
        )
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    if (
        kind == "dynamic"
    ):  # the base at which the slowest pair turns as far over the text as it did in training
        stretch = factor * max(seq_len, trained) / trained - (factor - 1)
        base *= stretch ** (head_dim / (head_dim - 2))
    frequencies = (
        1 / base**pairs
    )  # rounded as in transformers: 6e-8 of 5,000 radians is not nothing
    if kind == "linear":
        return frequencies / factor, 1.0
    if kind != "yarn":
        return frequencies, 1.0
    per_turn = head_dim / (
        2 * math.log(base)
    )  # the pair, as a real number, that makes so many turns in training:
    fast, slow = (
        per_turn * math.log(trained / (turns * 2 * math.pi)) for turns in (FAST_TURNS, SLOW_TURNS)
    )
    fast, slow = max(math.floor(fast), 0), min(math.ceil(slow), head_dim - 1)
    slowed = ((torch.arange(head_dim // 2) - fast) / max(slow - fast, 1e-3)).clamp(0, 1)
    return frequencies * (1 - slowed + slowed / factor), 0.1 * math.log(
        factor
    ) + 1 if factor > 1 else 1.0


def rotate(x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Turn queries or keys x [B, H, S, E] by their positions [S] or [B, S]; dimension i pairs with i + E/2.

    The product of a turned query and a turned key depends on the distance of their positions only.
    """
    angles = positions[..., None].float() * frequencies.to(
        positions.device
    )  # [S, E/2]; fp32: bf16 has no 257
    cos, sin = (f(angles).to(x.dtype).unsqueeze(-3) for f in (torch.cos, torch.sin))  # [1, S, E/2]
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


@torch.no_grad()
def position_losses(model: Any, row: torch.Tensor, *, window: int) -> list[float]:
    """Mean loss of every `window` tokens along one text, row [1, S]: where does the model lose its way?

    The logits are made window by window; 10,000 tokens of them would take gigabytes. Raises ValueError for another
    shape, a window below 1, and a model that scales its logits (Cohere, Granite).
    """
    causal = getattr(model, "get_base_model", lambda: model)()  # without adapters
    scales = [getattr(causal.config, name, None) or 1 for name in ("logit_scale", "logits_scaling")]
    if scales != [1, 1]:
        raise ValueError(
            f"{type(causal).__name__} scales its logits: take the loss of model(labels=…)"
        )
    if window < 1 or row.dim() != 2 or len(row) != 1 or row.shape[1] < 2:
        raise ValueError(
            f"window={window}, row {list(row.shape)}: give a window of 1 or more and one row [1, S], S > 1"
        )
    hidden = causal.base_model(input_ids=row, use_cache=False).last_hidden_state[
        0, :-1
    ]  # [S - 1, D]
    cap, losses = getattr(causal.config, "final_logit_softcapping", None), []
    for part, targets in zip(hidden.split(window), row[0, 1:].split(window)):
        logits = causal.get_output_embeddings()(part).float()
        logits = cap * torch.tanh(logits / cap) if cap else logits
        losses.append(torch.nn.functional.cross_entropy(logits, targets).item())
    return losses


def check_length(model: Any, seq_len: int) -> int:
    """The longest text that the positions of `model` are meant for; ValueError if `seq_len` is longer.

    A table of learned positions ends there with an IndexError; rotary ones go on in silence, and get worse.
    """
    allowed = estimate_rope_scaling(model)
    if seq_len > allowed:
        known = getattr(model.config, "rope_parameters", None) or {}
        trained = known.get(
            "original_max_position_embeddings", model.config.max_position_embeddings
        )
        remedy = (
            f"apply_rope_scaling(model, kind='yarn', factor={math.ceil(seq_len / trained)})"
            if known
            else "none"
        )
        anew = " on the model as it was before its scaling" * (
            known.get("rope_type", "default") != "default"
        )
        raise ValueError(
            f"seq_len={seq_len}: the positions of this model end at {allowed:,}; remedy: {remedy}{anew}"
        )
    return allowed


def estimate_rope_scaling(model: Any, *, factor: float = 1.0) -> int:
    """Positions that the model is meant for, after a scaling by `factor`: the trained length times the factor."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    scaled = (
        rope["factor"] if rope.get("rope_type") == "dynamic" else 1.0
    )  # whose config keeps the trained length
    return int(model.config.max_position_embeddings * scaled * factor)
