"""RoPE scaling: rotary position embeddings, stretched so that a trained model reads longer texts.

Problem    Rotary embeddings turn queries and keys by an angle per position. Beyond the trained
           length come angles that the model has never seen, and attention breaks down.
Idea       angle(position, i) = position * base ** (-2i / head_dim)      i: pair of dimensions

               linear    position / factor: all frequencies are slower, and nearby words blur
                         (position interpolation)
               dynamic   a larger base, only when the text is longer than the training was (NTK)
               yarn      slow the low frequencies only, those that never turned whole; sharpen the
                         softmax a little

Saves      Training on long texts: `factor` times the trained length with little or no fine-tuning.
Costs      linear and yarn change short texts too, because the factor is fixed. dynamic recomputes
           the frequencies as a text grows, and keys that are cached already keep the old ones.
Use when   Texts are longer than `max_position_embeddings`.
Not when   Texts are no longer. The authors of Qwen3 leave YaRN off until it is needed.
In production   `"rope_parameters": {"rope_type": "yarn", "factor": 4.0,
           "original_max_position_embeddings": 32768}` in config.json; vLLM `--hf-overrides` with
           the same.
Source     Su et al., "RoFormer" (arXiv 2104.09864); Chen et al., "Position Interpolation" (arXiv
           2306.15595); Peng et al., "YaRN" (arXiv 2309.00071); bloc97, "NTK-Aware Scaled RoPE"
           (2023).

`apply_rope_scaling` writes the configuration, from which transformers computes the frequencies;
`rotate` is the formula itself.

Shapes: B batch, H heads, S sequence, E head dimension.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from recipes_lib.core.checks import check_choice, check_number
from recipes_lib.core.model.causal_lm import longest_text, without_adapters
from recipes_lib.core.model.probe import proves

# --- the idea: what a learner can copy ------------------------------------------------------------


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Turn queries or keys x [B, H, S, E] by their positions [S] or [B, S]: RoPE itself.

    Dimension i pairs with i + E/2, and its frequency is base ** (-2i / E): `frequencies` [E/2]. The
    product of a turned query and a turned key depends on the distance of their positions only.
    """
    # In fp32, because bf16 has no number 257.
    angles = positions[..., None].float() * frequencies.to(positions.device)  # [S, E/2]
    cos = angles.cos().to(x.dtype).unsqueeze(-3)  # [1, S, E/2]
    sin = angles.sin().to(x.dtype).unsqueeze(-3)  # [1, S, E/2]
    a, b = x.chunk(2, dim=-1)  # [B, H, S, E/2] each
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


# --- the technique --------------------------------------------------------------------------------

KINDS = ("linear", "dynamic", "yarn")


# A dynamic scaling changes no text of 16 tokens, a linear one does.
@proves("changes", tried_with={"kind": "linear"})
def apply_rope_scaling(model: Any, *, kind: str, factor: float) -> Any:
    """Scale the rotary embedding of `model` in place, for texts `factor` times its trained length.

    The configuration changes with it, so that `save_pretrained` keeps the scaling. Returns `model`.
    """
    check_choice(KINDS, kind=kind)
    check_number(factor=factor, above=1)
    causal = without_adapters(model)
    trunk = causal.base_model
    config = causal.config
    known = _rope_parameters(causal)
    if not hasattr(trunk, "rotary_emb") or "rope_type" not in known:
        raise ValueError("it has no single rotary embedding to scale")
    if known["rope_type"] != "default":
        raise ValueError(f"it is scaled already ({known['rope_type']}): load the original")

    config.rope_parameters = {**known, "rope_type": kind, "factor": float(factor)}
    # The other kinds do not read it, and transformers would warn of it.
    if kind == "yarn":
        config.rope_parameters["original_max_position_embeddings"] = config.max_position_embeddings
    # dynamic compares the text with the trained length, which therefore stays.
    if kind != "dynamic":
        config.max_position_embeddings = int(config.max_position_embeddings * factor)
    # Mixtral leaves the width of a head open, and transformers computes with it for these kinds.
    if getattr(config, "head_dim", 0) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    _require_loadable(config)
    own = trunk.rotary_emb
    trunk.rotary_emb = type(own)(config=config).to(own.inv_freq.device)
    return model


def _require_loadable(config: Any) -> None:
    """Raise ValueError unless the configuration of RoPE is the same after saving and loading."""
    loaded = type(config).from_dict(config.to_dict()).rope_parameters
    kind = config.rope_parameters["rope_type"]
    if loaded["rope_type"] != kind:
        raise ValueError(
            f"its configuration loads with rope_type={loaded['rope_type']!r}, no {kind}"
        )


def check_length(model: Any, seq_len: int) -> int:
    """The longest text that the rotary positions of `model` are meant for; ValueError beyond it."""
    allowed = longest_text(model.config)
    if seq_len <= allowed:
        return allowed
    known = _rope_parameters(model)
    remedy = "none"
    if known:
        factor = math.ceil(seq_len / _trained_length(model, known))
        remedy = f"apply_rope_scaling(model, kind='yarn', factor={factor})"
    if known.get("rope_type", "default") != "default":
        remedy += " on the model as it was before its scaling"
    raise ValueError(
        f"seq_len={seq_len}: the positions of this model end at {allowed:,}; remedy: {remedy}"
    )


def _trained_length(model: Any, known: dict[str, Any]) -> float:
    """The longest text of the training, also of a model whose RoPE is scaled."""
    longest = model.config.max_position_embeddings
    if known.get("rope_type") == "linear":
        longest /= known["factor"]
    return known.get("original_max_position_embeddings", longest)


def _rope_parameters(model: Any) -> dict[str, Any]:
    return getattr(model.config, "rope_parameters", None) or {}
