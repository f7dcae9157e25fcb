"""The weights of a Hugging Face model in the names, order and grid that ExecuTorch's Llama expects.

ExecuTorch has its own Llama. Three things about its weights differ from Hugging Face:

    names      model.layers.0.self_attn.q_proj  ->  layers.0.attention.wq
    order      rows of the query and the key: see `plain_pairs` in language_model.py
    sharing    the output layer has weights of its own

A weight that is on a grid of whole numbers is a tensor of torchao. The export takes it as it is.

Shapes: N outputs and K inputs of a layer, D of a head, H heads, G inputs share a scale.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

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
EMBEDDING = "tok_embeddings.weight"
OUTPUT = "output.weight"


def in_pairs(weight: Tensor, *, head_dim: int) -> Tensor:
    """What `plain_pairs` does to a weight [N, K], and to a bias [N], all heads at once."""
    shape = weight.shape
    halves = weight.reshape(-1, 2, head_dim // 2, *shape[1:])  # [H, 2, D/2, K]
    return halves.transpose(1, 2).reshape(shape).contiguous()


def llama_weights(
    model: Any,
    *,
    weight_bits: int | None,
    group: int,
    output_bits: int | None,
    embedding_bits: int | None,
) -> dict[str, Tensor]:
    """All weights of `model` under ExecuTorch's names, on their grids. The model stays as it is.

    Arguments as in `export_language_model`; a width of None leaves the weights in fp32.
    """
    weights = {"norm.weight": _plain(model.model.norm.weight)}
    embedding = _plain(model.get_input_embeddings().weight)
    weights[EMBEDDING] = on_embedding_grid(embedding, bits=embedding_bits)
    output = _plain(model.get_output_embeddings().weight).clone()  # shared with the embedding
    weights[OUTPUT] = on_linear_grid(output, bits=output_bits, group=group)
    for number, block in enumerate(model.model.layers):
        for name, there in NORMS.items():
            norm = block.get_submodule(name)
            weights[f"layers.{number}.{there}.weight"] = _plain(norm.weight)
        for name, there in LINEARS.items():
            linear = block.get_submodule(name)
            for kind, values in _rows(linear, name, model).items():
                if kind == "weight":
                    values = on_linear_grid(values, bits=weight_bits, group=group)
                weights[f"layers.{number}.{there}.{kind}"] = values
    return weights


def _rows(linear: nn.Linear, name: str, model: Any) -> dict[str, Tensor]:
    """Weight and bias of a layer, in ExecuTorch's order."""
    rows = {"weight": _plain(linear.weight)}
    if linear.bias is not None:
        rows["bias"] = _plain(linear.bias)
    if name not in ROTATED:
        return rows
    head_dim = head_width(model.config)
    return {kind: in_pairs(values, head_dim=head_dim) for kind, values in rows.items()}


def head_width(config: Any) -> int:
    """D, the numbers of a head."""
    given = getattr(config, "head_dim", None)
    if given is not None:
        return given
    return config.hidden_size // config.num_attention_heads


def _plain(values: Tensor) -> Tensor:
    """In fp32 on the CPU, without a gradient."""
    return values.detach().to(device="cpu", dtype=torch.float32)


# --- grids ----------------------------------------------------------------------------------------


def on_linear_grid(weight: Tensor, *, bits: int | None, group: int) -> Tensor:
    """A linear layer's `weight` [N, K] as whole numbers, its inputs rounded to 8 bits as they come.

    With 4 bits `group` inputs share a scale, with 8 bits all inputs of a row do.
    """
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
    return _quantized(linear, weight, config)


def on_embedding_grid(weight: Tensor, *, bits: int | None) -> Tensor:
    """An embedding's `weight` [V, K] as whole numbers, with one scale per row."""
    from torchao.quantization import IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerAxis

    if bits is None:
        return weight
    embedding = nn.Embedding(*weight.shape, device="meta")
    config = IntxWeightOnlyConfig(weight_dtype=getattr(torch, f"int{bits}"), granularity=PerAxis(0))
    return _quantized(embedding, weight, config)


def _quantized(layer: nn.Module, weight: Tensor, config: Any) -> Tensor:
    """What torchao makes of `weight` in this layer."""
    from torchao.quantization import quantize_

    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)

    def is_the_layer(module: nn.Module, _name: str) -> bool:
        return module is layer

    quantize_(layer, config, filter_fn=is_the_layer)
    return layer.weight
