"""A tiny model of every family of causal LMs that the installed transformers knows.

Nobody lists the families: `FAMILIES` is what transformers maps to `AutoModelForCausalLM`. A tiny
configuration is the family's own with small numbers under the names of its sizes. What that does
not make small or does not make valid stands in `EXCEPTIONS`.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

FAMILIES = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCABULARY = 64
MOST_PARAMETERS = 3_000_000

# The value of a setting, for all names under which families have it.
SMALL = {
    32: (
        "hidden_size d_model n_embd dim emb_dim embedding_dim embedding_size word_embed_proj_dim "
        "input_embedding_size output_embedding_size lru_width attention_hidden_size ple_embed_dim "
        "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
        "shared_experts_intermediate_size moe_shared_expert_intermediate_size "
        "expert_ffn_hidden_size"
    ),
    VOCABULARY: (
        "vocab_size vocab_size_per_layer_input unpadded_vocab_size decoder_vocab_size "
        "intermediate_size ffn_dim d_inner dim_ff dff feed_forward_size ffn_hidden_size n_inner "
        "encoder_ffn_dim decoder_ffn_dim intermediate_size_mlp dense_intermediate_size"
    ),
    16: "q_lora_rank kv_lora_rank o_lora_rank router_hidden_size state_size ssm_state_size "
    "mamba_d_state chunk_size mamba_chunk_size block_size num_buckets index_head_dim "
    "linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim mamba_headdim "
    "linear_head_dim kda_head_dim",
    12: "qk_head_dim",
    8: (
        "head_dim swa_head_dim d_head dim_head kv_channels attention_head_dim v_head_dim "
        "qk_nope_head_dim attention_head_size hidden_size_per_layer_input adapter_rank "
        "laurel_rank hc_lowrank d_rel gated_norm_rank index_topk sliding_window "
        "sliding_window_size window_size local_attention attention_window_size "
        "attention_chunk_size encoder_attention_window"
    ),
    4: (
        "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads "
        "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads "
        "swa_num_attention_heads qk_rope_head_dim rotary_dim num_experts num_local_experts "
        "n_routed_experts moe_num_experts mamba_n_heads mamba_num_heads linear_num_value_heads "
        "linear_num_heads n_mamba_heads time_step_rank mamba_dt_rank index_n_heads"
    ),
    2: (
        "num_key_value_heads num_kv_heads swa_num_key_value_heads num_query_groups "
        "num_experts_per_tok num_experts_per_token moe_topk moe_k linear_num_key_heads "
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_blocks "
        "num_encoder_layers num_decoder_layers num_layers_per_stack hc_mult hc_count o_groups"
    ),
    1: (
        "n_group n_groups topk_group mamba_n_groups mamba_ngroups num_expert_group "
        "num_shared_experts n_shared_experts moe_num_shared_experts first_k_dense_replace "
        "num_dense_layers num_nextn_predict_layers"
    ),
    0: "num_kv_shared_layers",
    128: (
        "max_position_embeddings n_positions n_ctx max_seq_len context_length "
        "max_target_positions max_source_positions model_max_length"
    ),
}
NUMBERS = {name: value for value, names in SMALL.items() for name in names.split()}

DROPOUT = ("dropout", "_pdrop", "dropout_prob", "dropout_p", "layerdrop", "jitter_noise", "_noise")
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")

LIKE_ROBERTA = {"pad_token_id": 1}
QWEN4_INDEX = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
LISTS_OF_LAYERS = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types")

# What a family needs beside that, or else.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "camembert": LIKE_ROBERTA,
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }
    },
    "data2vec-text": LIKE_ROBERTA,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {
            "hidden_size": 32,
            "ffn_hidden_size": 64,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "gemma3n_text": {"intermediate_size": 64, "activation_sparsity_pattern": [0.0, 0.0]},
    "gemma4": {"text_config": {"pad_token_id": 0}},
    "gemma4_unified": {"text_config": {"pad_token_id": 0}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 16, "expand": 2},
    "prophetnet": {"pad_token_id": 0},
    "qwen4_exp": {"text_config": QWEN4_INDEX},
    "qwen4_exp_text": QWEN4_INDEX,
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [4, 6]},
    "roberta": LIKE_ROBERTA,
    "roberta-prelayernorm": LIKE_ROBERTA,
    "roc_bert": {"pronunciation_vocab_size": 16, "shape_vocab_size": 16},
    "xlm": {"pad_index": 2, "causal": True},
    "xlm-roberta": LIKE_ROBERTA,
    "xlm-roberta-xl": LIKE_ROBERTA,
    "xmod": LIKE_ROBERTA | {"default_language": "en_XX"},
    "zamba": {
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_hidden_layers": 4,
    },
    "zamba2": {"attention_head_dim": 16, "attention_hidden_size": 64},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(family: str, **options: Any) -> PretrainedConfig:
    """The configuration of a family of transformers ("llama") with small numbers."""
    kind = CONFIG_MAPPING[family]
    settings = _small_settings(kind)
    for name, value in (EXCEPTIONS.get(family, {}) | options).items():
        if name in kind.sub_configs:
            value = settings.get(name, {}) | value
        settings[name] = value
    return kind(**settings)


def _small_settings(kind: type[PretrainedConfig]) -> dict[str, Any]:
    default = kind()
    settings = {}
    for name, value in default.to_dict().items():
        if name in kind.sub_configs:
            part = getattr(default, name)
            if part is not None:
                settings[name] = _small_settings(type(part))
        elif name in NUMBERS and _may_be_set(name, value):
            settings[name] = NUMBERS[name]
        elif name.endswith(DROPOUT) and isinstance(value, int | float):
            settings[name] = type(value)(0)
    settings |= _layers(kind, default)
    if "kv_lora_rank" in settings:  # latent attention: keys of all heads, of which a part turns
        settings["num_key_value_heads"] = settings["num_attention_heads"]
        settings["head_dim"] = settings["qk_rope_head_dim"]
    for name in TOKENS:
        field = kind.__dataclass_fields__.get(name)
        if field is not None:
            settings[name] = None if "None" in str(field.type) else 0
    return settings


def _layers(kind: type[PretrainedConfig], default: PretrainedConfig) -> dict[str, Any]:
    """As many layers as the family has kinds of them, and two at least."""
    settings: dict[str, Any] = {}
    lists = [name for name in LISTS_OF_LAYERS if name in kind.__dataclass_fields__]
    kinds = {name: _kinds(default, name) for name in lists}
    layers = max([2, *map(len, kinds.values())])
    for name, values in kinds.items():
        if values:
            settings[name] = (values * layers)[:layers]
            settings["num_hidden_layers"] = layers
    return settings


def _may_be_set(name: str, value: Any) -> bool:
    """Whether this setting is a number here; a family with None as its window has no window."""
    return isinstance(value, int) or (value is None and "window" not in name)


def _kinds(default: PretrainedConfig, name: str) -> list[str]:
    """The kinds of layers that a family has, each once."""
    values = getattr(default, name, None)
    if not isinstance(values, list | tuple):
        return []
    return list(dict.fromkeys(values))


def tiny_model(family: str, **options: Any) -> Any:
    """A causal LM of this family in fp32, in which no parameter is zero by chance."""
    config = tiny_config(family, **options)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise AssertionError(f"{family}: {size:,} parameters are not tiny")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return perturbed(model).eval()


@torch.no_grad()
def perturbed(model: Any) -> Any:
    """Move every parameter, so that a norm or a bias that is forgotten changes the result."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of transformers about slow paths and odd token ids."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)
