"""RoPE scaling: a trained model reads texts that are longer than those it was trained on.

Problem    Rotary embeddings turn queries and keys by an angle per position. Beyond the trained length come angles
           that the model has never seen, and attention breaks down.
Idea       angle(position, i) = position * base ** (-2i / head_dim)      i: pair of dimensions

               linear    position / factor        all frequencies slower: nearby words blur
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
           al., "YaRN" (arXiv 2309.00071). The frequencies are computed by transformers.
"""

from __future__ import annotations

from typing import Any

KINDS = ("linear", "dynamic", "yarn")


def apply_rope_scaling(model: Any, *, kind: str, factor: float) -> Any:
    """Scale the rotary embedding of `model` in place, for texts up to `factor` times its trained length.

    The configuration changes with it, so that `save_pretrained` keeps the scaling.
    Raises ValueError for another kind, factor <= 1, and a model without one rotary embedding for all of its layers.
    """
    if kind not in KINDS or factor <= 1:
        raise ValueError(f"kind={kind!r}, factor={factor}: choose one of {', '.join(KINDS)}, and a factor above 1")
    config, rotary = model.config, getattr(model.base_model, "rotary_emb", None)
    known = getattr(config, "rope_parameters", None) or {}
    if rotary is None or "rope_type" not in known:
        raise ValueError(f"{type(model).__name__} has no single rotary embedding to scale: it cannot be stretched here")
    if known["rope_type"] != "default":
        raise ValueError(f"the model is scaled already ({known['rope_type']}): load the original configuration")
    config.rope_parameters = dict(known) | {
        "rope_type": kind,
        "factor": float(factor),
        "original_max_position_embeddings": config.max_position_embeddings,
    }
    if kind != "dynamic":  # dynamic compares the text with the trained length, which therefore stays
        config.max_position_embeddings = estimate_rope_scaling(model, factor=factor)
    model.base_model.rotary_emb = type(rotary)(config=config).to(rotary.inv_freq.device)
    return model


def estimate_rope_scaling(model: Any, *, factor: float) -> int:
    """Positions that the scaled model is meant for: the trained length times the factor."""
    return int(model.config.max_position_embeddings * factor)
