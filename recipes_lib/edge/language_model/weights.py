"""The weights of a Hugging Face model in the names, order and grid that ExecuTorch's Llama expects.

ExecuTorch has its own Llama. Three things about its weights differ from Hugging Face:

    names      model.layers.0.self_attn.q_proj  ->  layers.0.attention.wq
    order      rows of the query and the key: see `plain_pairs` in language_model
    sharing    the output layer has weights of its own

Whether it is the same model then, a comparison decides: both read the same tokens.

A weight that is on a grid of whole numbers is a tensor of torchao. The export takes it as it is.

Shapes: N outputs and K inputs of a layer, D of a head, H heads, G inputs share a scale.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from recipes_lib.core.model.linears import quantized_layers
from recipes_lib.edge._llama import head_width, in_pairs

# The linear layers of a block, in both models.
LINEARS = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
}
NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
ROTATED = ("self_attn.q_proj", "self_attn.k_proj")
COMPARED_TOKENS = 16
# Of the norm of the logits: fp32 is off by less than 1e-5, a wrong epsilon by 1e-2.
LARGEST_ERROR = 1e-3
# A rounding that falls to the other side in one layer moves the next ones; another grid of the
# weights moves the logits by a tenth or more.
LARGEST_ERROR_ON_A_GRID = 5e-2


def bits_of_ends(weight_bits: int | None) -> int | None:
    """Of the embedding and the output layer: with 4 the perplexity would rise too far."""
    if weight_bits is None:
        return None
    return 8


def llama_weights(model: Any, weight_bits: int | None, group: int) -> dict[str, Tensor]:
    """All weights of `model` under ExecuTorch's names, on their grids. The model stays as it is."""
    embedding = _plain_tensor(model.get_input_embeddings().weight)
    output = _plain_tensor(
        model.get_output_embeddings().weight
    ).clone()  # shared with the embedding
    of_ends = bits_of_ends(weight_bits)
    weights = {
        "norm.weight": _plain_tensor(model.model.norm.weight),
        "tok_embeddings.weight": on_embedding_grid(embedding, bits=of_ends),
        "output.weight": on_linear_grid(output, bits=of_ends, group=group),
    }
    for number, block in enumerate(model.model.layers):
        for name, there in NORMS.items():
            norm = block.get_submodule(name)
            weights[f"layers.{number}.{there}.weight"] = _plain_tensor(norm.weight)
        for name, there in LINEARS.items():
            rows = _rows_of_projection(block.get_submodule(name), name, model.config)
            grid = on_linear_grid(rows["weight"], bits=weight_bits, group=group)
            weights[f"layers.{number}.{there}.weight"] = grid
            if "bias" in rows:
                weights[f"layers.{number}.{there}.bias"] = rows["bias"]
    return weights


def _rows_of_projection(linear: nn.Linear, name: str, config: Any) -> dict[str, Tensor]:
    """The rows of a projection in the order of ExecuTorch's Llama, weight and bias."""
    rows = {"weight": _plain_tensor(linear.weight)}
    if linear.bias is not None:
        rows["bias"] = _plain_tensor(linear.bias)
    if name not in ROTATED:
        return rows
    head_dim = head_width(config)
    return {kind: in_pairs(values, head_dim=head_dim) for kind, values in rows.items()}


def _plain_tensor(values: Tensor) -> Tensor:
    return values.detach().to(device="cpu", dtype=torch.float32)


def llama_parameters(config: Any) -> dict[str, Any]:
    """The sizes of a model by ExecuTorch's names. What is missing there has a silent default."""
    rope = config.rope_parameters
    parameters = {
        "dim": config.hidden_size,
        "hidden_dim": config.intermediate_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "head_dim": head_width(config),
        "vocab_size": config.vocab_size,
        "norm_eps": config.rms_norm_eps,
        "rope_theta": rope["rope_theta"],
        "use_scaled_rope": rope["rope_type"] == "llama3",
        "use_hf_rope": False,
        "attention_qkv_bias": config.model_type == "qwen2",
    }
    if rope["rope_type"] == "llama3":
        parameters["rope_scale_factor"] = rope["factor"]
        parameters["high_freq_factor"] = rope["high_freq_factor"]
    return parameters


@torch.no_grad()
def require_same_logits(model: Any, weight_bits: int | None, group: int) -> None:
    """ExecuTorch's Llama with these weights answers as `model` does.

    With unrounded weights, unless the model rounds them itself: then on the grid of the file.
    """
    from executorch.examples.models.llama.llama_transformer import construct_transformer
    from executorch.examples.models.llama.model_args import ModelArgs

    most = LARGEST_ERROR_ON_A_GRID
    if not quantized_layers(model):
        weight_bits = None
        most = LARGEST_ERROR
    sizes = {"max_seq_len": COMPARED_TOKENS, "max_context_len": COMPARED_TOKENS}
    arguments = ModelArgs(**llama_parameters(model.config), **sizes, generate_full_logits=True)
    llama = construct_transformer(arguments).eval()
    llama.load_state_dict(llama_weights(model, weight_bits, group), strict=False, assign=True)
    tokens = torch.linspace(0, model.config.vocab_size - 1, COMPARED_TOKENS).long()[None]
    # In fp32 on the CPU, as the file will be, whatever the model is stored in.
    tensors = [*model.named_parameters(), *model.named_buffers()]  # a shared weight comes once
    state = {name: _plain_tensor(values) for name, values in tensors}
    expected = torch.func.functional_call(model, state, (tokens,), {"use_cache": False}).logits
    error = float((llama(tokens) - expected).norm() / expected.norm())
    if not error < most:  # nor is NaN
        raise ValueError(
            f"ExecuTorch's Llama with the weights of this {type(model).__name__} gives logits that "
            f"are off by {error:.1%}: it has no place for biases of the output projection and the "
            f"MLP, for adapters (merge them first), or for layers that compute something of their "
            f"own; and a model that trains on a grid needs the same weight_bits and group here"
        )


# --- grids ----------------------------------------------------------------------------------------


def on_linear_grid(weight: Tensor, *, bits: int | None, group: int | None) -> Tensor:
    """For ExecuTorch: a linear layer's `weight` [N, K] as whole numbers; inputs get 8 bits."""
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig
    from torchao.quantization.granularity import PerAxis, PerGroup

    if bits is None:
        return weight
    granularity = PerAxis(0)
    if bits == 4:
        granularity = PerGroup(group)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    config = Int8DynamicActivationIntxWeightConfig(
        weight_dtype=getattr(torch, f"int{bits}"), weight_granularity=granularity
    )
    return _on_torchao_grid(linear, weight, config)


def on_embedding_grid(weight: Tensor, *, bits: int | None) -> Tensor:
    """For ExecuTorch: an embedding's `weight` [V, K] as whole numbers, with one scale per row."""
    from torchao.quantization import IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerAxis

    if bits is None:
        return weight
    embedding = nn.Embedding(*weight.shape, device="meta")
    config = IntxWeightOnlyConfig(weight_dtype=getattr(torch, f"int{bits}"), granularity=PerAxis(0))
    return _on_torchao_grid(embedding, weight, config)


def _on_torchao_grid(layer: nn.Module, weight: Tensor, config: Any) -> Tensor:
    """The weight of a layer as torchao stores it for ExecuTorch."""
    from torchao.quantization import quantize_

    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)

    def is_the_layer(module: nn.Module, _name: str) -> bool:
        return module is layer

    quantize_(layer, config, filter_fn=is_the_layer)
    return layer.weight
