"""What a causal language model is here, and where its parts are.

Every technique that changes a model asks `require_causal_lm` first, before it changes anything.
What it lets through has decoder blocks, an input embedding and an output layer, and reads from left
to right.

    model   adapters (peft) around it, or not
    └ causal LM            LlamaForCausalLM        without_adapters(model)
      ├ trunk              LlamaModel              .base_model
      │ ├ embedding                                .get_input_embeddings()
      │ ├ decoder blocks   ModuleList              decoder_blocks(model)
      │ └ final norm
      └ output layer       Linear, [V, D]          .get_output_embeddings()
"""

from __future__ import annotations

from typing import Any

from torch import nn

# Names of modules in a mixture of experts that pick experts.
ROUTERS = {"gate", "router", "wg", "shared_expert_gate"}

# Parts of the names of encoders beside the text, in models that also see or hear.
OTHER_SENSES = ("vision", "visual", "image", "audio", "speech")

# Parts of the names of kernels in which each token reads all tokens before it.
FULL_ATTENTIONS = ("eager", "sdpa", "flash", "flex", "fused")


def require_causal_lm(model: Any) -> None:
    """Raise ValueError unless `model` is a Hugging Face causal LM, with adapters or without."""
    problem = _why_no_causal_lm(model)
    if problem:
        raise ValueError(
            f"{type(model).__name__} {problem}: "
            f"give a decoder-only model, such as AutoModelForCausalLM.from_pretrained(…) returns"
        )


def is_causal_lm(model: Any) -> bool:
    """Whether `require_causal_lm` lets it through."""
    return _why_no_causal_lm(model) is None


def _why_no_causal_lm(model: Any) -> str | None:
    """What is wrong with a model, in a few words; None for a causal LM."""
    from transformers import PreTrainedModel
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING

    causal = without_adapters(model)
    if not isinstance(causal, PreTrainedModel):
        return "is no Hugging Face model"
    config = causal.config
    if getattr(config, "is_encoder_decoder", False):
        return "has an encoder and a decoder"
    if causal.get_output_embeddings() is None or not causal.can_generate():
        return "has no output layer over the vocabulary"
    # BERT and its relatives read in both directions, unless their configuration says "decoder".
    reads_both_ways = type(config) in MODEL_FOR_MASKED_LM_MAPPING
    if reads_both_ways and hasattr(config, "is_decoder") and not config.is_decoder:
        return "reads in both directions"
    if not _module_lists(causal):
        return "has no list of decoder blocks"
    return None


def without_adapters(model: Any) -> Any:
    """The model inside peft's wrapper, or `model` itself. Adapted layers stay adapted."""
    unwrap = getattr(model, "get_base_model", None)
    return model if unwrap is None else unwrap()


def decoder_blocks(model: Any) -> nn.ModuleList:
    """The transformer blocks of a Hugging Face causal LM: the list with the most modules inside.

    Other lists may be longer: norms of heads or experts inside of a block, small projections
    beside the blocks.
    """
    return max(_module_lists(model), key=lambda modules: len(list(modules.modules())))


def _module_lists(model: nn.Module) -> list[nn.ModuleList]:
    """The lists of modules in a causal LM's text part: an encoder of images may be larger."""
    lists = []
    for name, module in model.named_modules():
        of_the_text = not any(sense in name for sense in OTHER_SENSES)
        if of_the_text and isinstance(module, nn.ModuleList) and len(module) > 0:
            lists.append(module)
    return lists


def trunk(model: Any) -> nn.Module:
    """The module that holds the decoder blocks: embedding, blocks, final norm."""
    blocks = decoder_blocks(model)
    return next(module for module in model.modules() if blocks in module.children())


def norms_of(module: nn.Module) -> list[nn.Module]:
    """The norms of a causal LM in a block or in the trunk, not those of Q and K inside."""
    return [child for child in module.children() if "Norm" in type(child).__name__]


def leaf_names(module: nn.Module) -> set[str]:
    """The last names of all modules in a causal LM or a part: "q_proj" for "self_attn.q_proj"."""
    return {name.rpartition(".")[2] for name, _ in module.named_modules()}


def projection_widths(config: Any) -> tuple[int, int, int]:
    """Output features of a causal LM's projections: query, key, feed-forward: Q, KV, F.

    Raises ValueError where they differ from layer to layer (Gemma 4).
    """
    if getattr(config, "is_heterogeneous", False):
        raise ValueError(
            f"{type(config).__name__} gives each layer widths of its own: they cannot be counted "
            f"from one configuration"
        )
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    feed_forward = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    return heads * head_dim, kv_heads * head_dim, feed_forward or 4 * config.hidden_size


def longest_text(config: Any) -> int | None:
    """How many positions a causal LM was trained for; None if its configuration does not say.

    Most configurations count a stretching of the angles already, as Llama 3's 131,072 do. YaRN
    (Qwen) and dynamic scaling may leave the length of before there:

        yarn       original length x factor, or what the configuration says if that is more
        dynamic    positions x factor: transformers compares a text with the length of before
        others     positions: their factor says how far the angles were slowed
    """
    config = config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int):
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type")
    factor = rope.get("factor")
    if kind == "yarn" and factor is not None:
        original = rope.get("original_max_position_embeddings", positions)
        return max(positions, int(original * factor))
    if kind == "dynamic" and factor is not None:
        return int(positions * factor)
    return positions
