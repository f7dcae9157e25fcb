"""Hugging Face glue of the decode loop: reading the weights of a family, and refusing the others.

Three questions decide whether a model is read, and each sees what the others cannot:

    modules     Does a block hold what the loop computes, and nothing else?
    norms       Is each norm x / rms(x) * weight?              Gemma's is x / rms(x) * (1 + weight)
    logits      Does the decoder give the model's logits on a few tokens?          scaled embeddings

What shows only on long texts is asked of the configuration: sliding windows, and rotary angles that
change with the length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from recipes_lib.core.data.evaluation import evaluating
from recipes_lib.core.model.causal_lm import decoder_blocks, longest_text, trunk, without_adapters
from recipes_lib.core.model.linears import refuse_quantized
from recipes_lib.inference.decode_loop.norms import HeadNorm, RootMeanSquareNorm

# What a block of these families holds, by the names of transformers.
IN_BLOCK = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
IN_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
NORMS_IN_ATTENTION = {"q_norm", "k_norm"}  # Qwen3: of each head of queries and of keys
IN_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
IN_TRUNK = {"embed_tokens", "layers", "norm", "rotary_emb"}
# Kinds of rotary embeddings whose angles per position are the same for all lengths.
FIXED_ROPE = {"default", "linear", "yarn", "llama3"}

WAY_OUT = "the decode loop does not compute that; keep model.generate() for this model"
PROBE_TOKENS = 8
# Relative errors of logits: what the order of sums makes of them, and room for it.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


# --- what is read ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """What a block has to know beside its weights."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # of the scores, most often 1 / sqrt(head_dim)
    sharpening: float  # YaRN's: a factor of the rotated queries and keys
    window: int | None  # how many tokens attention looks back; None for all
    positions: int | None  # for which the model was trained; None if nothing says so


@dataclass(frozen=True)
class BlockWeights:
    """The layers of one block as the decode loop wants them."""

    qkv: nn.Linear
    output: nn.Linear
    gate_up: nn.Linear
    down: nn.Linear
    attention_norm: RootMeanSquareNorm
    mlp_norm: RootMeanSquareNorm
    query_key_norm: HeadNorm | None
    activation: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Weights:
    """The layers of a whole model."""

    sizes: Sizes
    embedding: nn.Embedding
    blocks: list[BlockWeights]
    norm: RootMeanSquareNorm
    head: nn.Linear
    frequencies: Tensor  # fp32 [E/2]: radians per position of each pair of dimensions


def read_weights(model: Any) -> Weights:
    """Read a model that `require_reproducible` lets through. Fused weights are copies."""
    inside = trunk(model)
    sizes = _sizes(model)
    embedding = nn.Embedding.from_pretrained(inside.embed_tokens.weight.detach())
    head = _linear(model.get_output_embeddings())
    if model.get_output_embeddings().weight is inside.embed_tokens.weight:
        head.weight = embedding.weight  # one parameter: what changes its dtype changes both
    return Weights(
        sizes=sizes,
        embedding=embedding,
        blocks=[_read_block(block, sizes) for block in decoder_blocks(model)],
        norm=_norm(inside.norm),
        head=head,
        frequencies=inside.rotary_emb.inv_freq.detach().float().cpu(),
    )


def _sizes(model: Any) -> Sizes:
    config = model.config
    attention = decoder_blocks(model)[0].self_attn
    return Sizes(
        heads=attention.q_proj.out_features // attention.head_dim,
        kv_heads=attention.k_proj.out_features // attention.head_dim,
        head_dim=attention.head_dim,
        scale=attention.scaling,
        sharpening=trunk(model).rotary_emb.attention_scaling,
        window=_window(config),
        positions=longest_text(config),
    )


def _window(config: Any) -> int | None:
    """The sliding window in tokens, if one of the layers has one."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and "sliding_attention" not in kinds:
        return None
    return getattr(config, "sliding_window", None)


def _read_block(block: nn.Module, sizes: Sizes) -> BlockWeights:
    attention = block.self_attn
    mlp = block.mlp
    queries = _pairs_together(attention.q_proj, sizes)
    keys = _pairs_together(attention.k_proj, sizes)
    values = (attention.v_proj.weight, attention.v_proj.bias)
    return BlockWeights(
        qkv=_stacked([queries, keys, values]),
        output=_linear(attention.o_proj),
        gate_up=_stacked([(part.weight, part.bias) for part in (mlp.gate_proj, mlp.up_proj)]),
        down=_linear(mlp.down_proj),
        attention_norm=_norm(block.input_layernorm),
        mlp_norm=_norm(block.post_attention_layernorm),
        query_key_norm=_head_norm(attention, sizes),
        activation=_activation(mlp.act_fn),
    )


def _pairs_together(linear: nn.Linear, sizes: Sizes) -> tuple[Tensor, Tensor | None]:
    """Weight and bias with the rows of each head in another order: 0, E/2, 1, E/2 + 1, …

    transformers rotates dimension i with i + E/2. Side by side they are one complex number. Scores
    are sums over the dimensions, so the same order in queries and keys leaves them as they are.
    """
    weight = _interleaved(linear.weight, sizes.head_dim)
    bias = None
    if linear.bias is not None:
        bias = _interleaved(linear.bias, sizes.head_dim)
    return weight, bias


def _interleaved(rows: Tensor, head_dim: int) -> Tensor:
    """[H * E, …] -> the same shape, where the halves of each head alternate."""
    halves = rows.detach().view(-1, 2, head_dim // 2, *rows.shape[1:])  # [H, 2, E/2, …]
    return halves.transpose(1, 2).reshape(rows.shape)


def _head_norm(attention: nn.Module, sizes: Sizes) -> HeadNorm | None:
    if not hasattr(attention, "q_norm"):
        return None
    q = _interleaved(attention.q_norm.weight, sizes.head_dim)  # [E]
    k = _interleaved(attention.k_norm.weight, sizes.head_dim)
    weight = torch.cat([q.expand(sizes.heads, -1), k.expand(sizes.kv_heads, -1)])  # [Hq + Hkv, E]
    return HeadNorm(weight, attention.q_norm.variance_epsilon)


def _stacked(parts: list[tuple[Tensor, Tensor | None]]) -> nn.Linear:
    """One linear layer whose outputs are those of the parts, one after the other. Copies."""
    weights = [weight for weight, _ in parts]
    biases = [bias for _, bias in parts if bias is not None]
    bias = None
    if biases:
        bias = torch.cat(biases)
    return _linear_of(torch.cat(weights), bias)


def _linear(linear: nn.Linear) -> nn.Linear:
    """A linear layer on the same memory, with parameters of its own."""
    return _linear_of(linear.weight, linear.bias)


def _linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    outputs, inputs = weight.shape
    # "meta" takes no memory for the weights that are replaced at once.
    linear = nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    linear.weight = _parameter(weight)
    if bias is not None:
        linear.bias = _parameter(bias)
    return linear


def _norm(norm: nn.Module) -> RootMeanSquareNorm:
    return RootMeanSquareNorm(norm.weight, norm.variance_epsilon)


def _activation(act_fn: nn.Module) -> Callable[[Tensor], Tensor]:
    """The function itself where it has one, without the call of a module around it."""
    if isinstance(act_fn, nn.SiLU) or type(act_fn).__name__ == "SiLUActivation":
        return functional.silu
    return act_fn


def _parameter(tensor: Tensor) -> nn.Parameter:
    """A parameter without a gradient on the same memory."""
    return nn.Parameter(tensor.detach(), requires_grad=False)


# --- guards ---------------------------------------------------------------------------------------


def require_reproducible(model: Any) -> None:
    """Raise ValueError for a model whose modules or configuration the loop does not reproduce."""
    causal = without_adapters(model)
    refuse_quantized(
        causal,
        way_out="make the decoder of the model in full precision, and quantize the decoder",
    )
    if any(parameter.is_meta for parameter in causal.parameters()):
        raise ValueError("the model has no weights yet (device meta): load them first")
    problem = _why_not(causal)
    if problem:
        raise ValueError(f"{type(causal).__name__} {problem}: {WAY_OUT}")


def _why_not(model: Any) -> str | None:
    """The first thing that is different; None for a model that can be read."""
    return next((problem for problem in _problems(model) if problem is not None), None)


def _problems(model: Any) -> Iterator[str | None]:
    """One check after the other: a later one needs what those before have found there."""
    inside = trunk(model)
    blocks = decoder_blocks(model)
    yield _other_children(inside, IN_TRUNK)
    for block in blocks:
        yield _other_children(block, IN_BLOCK)
        in_attention = set(IN_ATTENTION)
        if hasattr(block.self_attn, "q_norm"):
            in_attention |= NORMS_IN_ATTENTION
        yield _other_children(block.self_attn, in_attention)
        yield _other_children(block.mlp, IN_MLP)
    yield _other_layers(model)
    yield _other_positions(inside.rotary_emb, blocks[0].self_attn)
    yield _other_norms(inside, blocks)


def _other_children(module: nn.Module, expected: set[str]) -> str | None:
    names = {name for name, _ in module.named_children()}
    different = sorted(names ^ expected)
    if different:
        return f"differs from Llama in {', '.join(different[:3])} of its {type(module).__name__}"
    return None


def _other_layers(model: Any) -> str | None:
    """Adapters and quantized weights stand in the places of plain linear layers."""
    layers = [("the output layer", model.get_output_embeddings())]
    for block in decoder_blocks(model):
        inside = [*block.self_attn.named_children(), *block.mlp.named_children()]
        layers += [(name, layer) for name, layer in inside if name.endswith("_proj")]
    for name, layer in layers:
        if type(layer) is not nn.Linear:
            return f"has {type(layer).__name__} as {name}, not nn.Linear (merge adapters first)"
    embedding = trunk(model).embed_tokens
    if type(embedding) is not nn.Embedding:
        return f"has {type(embedding).__name__} as its embedding"
    if len({parameter.device for parameter in model.parameters()}) > 1:
        return "has its weights on several devices"
    return None


def _other_positions(rotary: nn.Module, attention: nn.Module) -> str | None:
    kind = getattr(rotary, "rope_type", None)
    if kind not in FIXED_ROPE or not hasattr(rotary, "inv_freq"):
        return f"has rotary angles of kind {kind}, which change with the length or the layer"
    if 2 * len(rotary.inv_freq) != attention.head_dim:
        return "rotates a part of each head"
    return None


def _other_norms(inside: nn.Module, blocks: nn.ModuleList) -> str | None:
    attention = blocks[0].self_attn
    norms = [inside.norm, blocks[0].input_layernorm, blocks[0].post_attention_layernorm]
    norms += [getattr(attention, name) for name in NORMS_IN_ATTENTION if hasattr(attention, name)]
    heads = attention.head_dim
    for norm in norms:
        if not hasattr(norm, "variance_epsilon") or not _is_rms_norm(norm):
            return f"has a {type(norm).__name__}, which is not x / rms(x) * weight"
    in_attention = norms[3:]
    if any(len(norm.weight) != heads for norm in in_attention):
        return "normalizes queries and keys over all heads together"
    return None


def _is_rms_norm(norm: nn.Module) -> bool:
    weight = norm.weight.detach()
    x = torch.linspace(-2, 3, len(weight), dtype=weight.dtype, device=weight.device)
    expected = functional.rms_norm(x, x.shape, weight, norm.variance_epsilon)
    with torch.no_grad():
        return _relative_error(norm(x), expected) <= TOLERANCE[weight.dtype]


@torch.no_grad()
def require_equal_logits(model: Any, decoder: Any) -> None:
    """Raise ValueError unless `decoder` gives the logits of `model` on a few tokens.

    Most of them come in one call and the last ones one by one, so both ways are compared.
    """
    causal = without_adapters(model)
    spread = torch.linspace(0, decoder.vocabulary - 1, PROBE_TOKENS)
    tokens = spread.long()[None].to(causal.device)  # [1, S]
    with evaluating(causal):
        expected = causal(tokens, use_cache=False).logits  # [1, S, V]

    cache = decoder.new_cache(max_tokens=PROBE_TOKENS)
    together, single = tokens.split([PROBE_TOKENS - 2, 2], dim=1)
    got = [decoder(together, cache)]
    got += [decoder(token, cache) for token in single.split(1, dim=1)]
    error = _relative_error(torch.cat(got, dim=1), expected)
    allowed = TOLERANCE[expected.dtype]
    if not error <= allowed:  # NaN is not
        raise ValueError(
            f"{type(causal).__name__} gives other logits than the decode loop (relative error "
            f"{error:.2g}, allowed {allowed:g}): {WAY_OUT}"
        )


def _relative_error(got: Tensor, expected: Tensor) -> float:
    """|got - expected| / |expected| in the Euclidean norm."""
    difference = (got.float() - expected.float()).norm()
    return (difference / expected.float().norm()).item()
