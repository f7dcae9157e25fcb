"""Whether the closed formula of a plain step (`core.plain_step`) holds for all blocks of a model.

    why = why_no_formula(model, seq=8192)
    None                                        it holds
    "its blocks have experts"                   it does not, and a dry step gives the prediction

The formula was read off the code of a few families. So it is not enough that the first block looks
as theirs do. Every block is compared with what the formula counts: its parts by name, the widths of
its projections, the functions in between, its dropout. The kernel of attention and the model's own
window decide with it: where rows are as long as the window, SDPA needs a mask, for which K and V
are repeated to as many heads as Q has.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from recipes_lib.core.model.causal_lm import (
    EXPERTS,
    decoder_blocks,
    is_layer_norm,
    leaf_names,
    norms_of,
    projection_widths,
    without_adapters,
)

# The families whose code the formula was read off; a test holds it to each of them.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gpt2")

# The parts of a block: with RMSNorm, with those of Gemma 2 beside, and those of GPT-2.
NORMS = ({"input_layernorm", "post_attention_layernorm"}, {"ln_1", "ln_2"})
MORE_NORMS = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
PROJECTIONS = ({"q_proj", "k_proj", "v_proj", "o_proj"}, {"c_attn", "c_proj"})
FEED_FORWARD = ({"gate_proj", "up_proj", "down_proj"}, {"c_fc", "c_proj"})

# What stands between the two halves of the MLP, by the names of transformers' configurations.
ACTIVATIONS = {"silu", "swish", "gelu", "gelu_pytorch_tanh"}

# Parts of the names of modules that mix tokens without attention.
OTHER_MIXERS = ("mamba", "conv", "ssm", "rwkv", "recurrent", "delta", "linear_attn")

# SDPA as transformers calls it, and as this package does.
KERNELS_WITH_A_MASK = ("sdpa", "fused", "fused_cudnn")

NO_DROPOUT = 0.0
ADAPTERS = "lora_"  # in the names of adapters, whose estimate counts their own dropout


def why_no_formula(model: Any, *, seq: int) -> str | None:
    """Why the formula does not hold for rows of `seq` tokens, as the end of "because …".

    None if it holds for all blocks. Gives the first reason that it finds.
    """
    for block in decoder_blocks(model):
        reason = _why_not_this_block(block, model)
        if reason:
            return reason
    return _why_not_this_attention(without_adapters(model).config, seq=seq)


# --- one block ------------------------------------------------------------------------------------


def _why_not_this_block(block: nn.Module, model: Any) -> str | None:
    names = leaf_names(block)
    if names & EXPERTS:
        return "its blocks have experts"
    other = [name for name in names if _mixes_otherwise(name)]
    if other:
        return f"its blocks have parts that are no attention ({min(other)})"
    norms = {name for name, child in block.named_children() if child in norms_of(block)}
    if norms - MORE_NORMS not in NORMS or norms & MORE_NORMS not in (set(), MORE_NORMS):
        return f"its blocks have other norms ({_listed(norms)})"
    if not _has_one_of(names, PROJECTIONS):
        return "its attention has other projections than q, k, v and o"
    if not _has_one_of(names, FEED_FORWARD):
        return "its MLP is neither gated nor that of GPT-2"
    config = without_adapters(model).config
    if config.model_type not in FAMILIES:
        return f"nobody has read the formula off the code of {config.model_type!r}"
    return _why_not_these_sizes(block, config)


def _mixes_otherwise(name: str) -> bool:
    return any(part in name.lower() for part in OTHER_MIXERS)


def _has_one_of(names: set[str], groups: tuple[set[str], ...]) -> bool:
    return any(group <= names for group in groups)


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _why_not_these_sizes(block: nn.Module, config: Any) -> str | None:
    """The formula takes the widths from the configuration. A pruned block may have others."""
    q, kv, feed_forward = projection_widths(config)
    if q > feed_forward:
        return f"its attention is wider ({q}) than its MLP ({feed_forward})"
    widths = {"q_proj": q, "k_proj": kv, "v_proj": kv, "gate_proj": feed_forward}
    widths["c_fc"] = feed_forward
    for name, module in block.named_modules():
        expected = widths.get(name.rpartition(".")[2])
        found = getattr(module, "out_features", getattr(module, "nf", expected))
        if expected is not None and found != expected:
            return f"its {name} has {found} features, and its configuration says {expected}"
        if isinstance(module, nn.Dropout) and module.p > NO_DROPOUT and ADAPTERS not in name:
            return f"its blocks have dropout ({module.p:g})"
    if getattr(config, "attention_dropout", NO_DROPOUT) > NO_DROPOUT:
        return f"its attention has dropout ({config.attention_dropout:g})"
    return _why_not_these_functions(block, config)


def _why_not_these_functions(block: nn.Module, config: Any) -> str | None:
    gpt2 = config.model_type == "gpt2"
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    if gpt2:
        activation = config.activation_function
    known = {"gelu_new"} if gpt2 else ACTIVATIONS
    if activation not in known:
        return f"its MLP has another activation ({activation})"
    if any(is_layer_norm(norm) != gpt2 for norm in norms_of(block)):
        return "its norms are of another kind"
    return None


# --- attention ------------------------------------------------------------------------------------


def _why_not_this_attention(config: Any, *, seq: int) -> str | None:
    """SDPA takes a mask, if the model's own window is not longer than the rows."""
    if config._attn_implementation not in KERNELS_WITH_A_MASK:
        return None  # eager attention has a mask in any case, and the others none
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if window is None or (kinds is not None and "sliding_attention" not in kinds):
        return None
    if seq < window:
        return None
    return f"its own window of {window} tokens needs a mask on rows of {seq}"
