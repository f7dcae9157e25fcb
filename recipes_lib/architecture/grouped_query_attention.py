"""Grouped-query attention: several heads of queries share one head of keys and values.

Problem    A decoder reads its KV cache for every token that it writes. The cache grows with the
           text and with the batch, and with a long text it is larger than the weights.
Idea       A trained model has a head of keys and values for every head of queries, or for some of
           them. Put neighbouring ones into groups, and give each group the mean of its heads:

               heads of queries            q1 q2 q3 q4   q5 q6 q7 q8
               before: keys and values     k1 k2 k3 k4   k5 k6 k7 k8     8 heads in the cache
               after                           k1'           k2'         2 heads in the cache

           k1' is the mean of k1 … k4. The projection is linear, so the mean is taken once, of its
           weights. The model is not the same any more: a short training run heals it.
Saves      The cache has 2 x layers x tokens x kv_heads x head_dim elements: it shrinks as the
           number of heads does. So do the two projections.
Costs      Quality. Heads that a model has learnt apart are mixed, and their mean is shorter than
           they were, so attention is flatter. The paper trains on for 5 % of the original steps.
Use when   Long texts or large batches fill the memory with the cache, and the model can be trained
           on. A model that is designed anew has few heads of keys and values from the start.
Not when   The model cannot be trained after it, or for minutes only and it has few heads already:
           SmolLM2's three know too different things to be one. Texts are short: the weights are
           what is read then. Queries, keys and values are one matrix (GPT-2, Phi-3), or each head
           of keys has a norm of its own (OLMo 2).
In production   `num_key_value_heads` in config.json: Llama 3, Qwen 2.5 and Mistral come with it,
           and vLLM, llama.cpp and transformers read it there.
Source     Ainslie et al., "GQA" (arXiv 2305.13245). One group for all: Shazeer, "Fast Transformer
           Decoding" (arXiv 1911.02150).

Shapes: B batch, H heads of queries, G heads of keys and values, T tokens, E head dimension,
D hidden.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from recipes_lib.core.checks import check_choice
from recipes_lib.core.model.bytes_of_tensors import storage_bytes
from recipes_lib.core.model.causal_lm import decoder_blocks, without_adapters
from recipes_lib.core.model.probe import proves

# --- the idea: what a learner can copy ------------------------------------------------------------


def mean_of_groups(weight: Tensor, *, heads: int, groups: int) -> Tensor:
    """The projection of keys or values [heads * E, D], or its bias [heads * E], with fewer heads.

    The heads of a group are neighbours, because query head h reads the keys of h // (H / G).
    """
    split = weight.view(groups, heads // groups, -1, *weight.shape[1:])  # [G, members, E, D]
    # In fp32, because a sum in 16 bits rounds at each member.
    pooled = split.float().mean(dim=1)  # [G, E, D]
    return pooled.flatten(0, 1).to(weight.dtype)  # [G * E, D]


# --- the technique --------------------------------------------------------------------------------


PROJECTIONS = ("k_proj", "v_proj")


@proves("changes")
@torch.no_grad()
def apply_grouped_query_attention(model: Any, *, kv_heads: int) -> Any:
    """Pool the heads of keys and values of every block to `kv_heads`, in place; returns `model`.

    The configuration changes with it: the model saves, loads, generates and trains like any other.
    Its loss is worse until it has been trained on. Make the optimizer after this, because the
    projections are new parameters.
    """
    causal = without_adapters(model)
    config = causal.config.get_text_config()
    heads = config.num_key_value_heads
    check_choice([number for number in range(1, heads) if heads % number == 0], kv_heads=kv_heads)
    attentions = _grouped_attentions(causal)
    for name, attention in attentions.items():
        _check_heads(name, attention, heads)
    for attention in attentions.values():
        for projection in PROJECTIONS:
            whole = getattr(attention, projection)
            setattr(attention, projection, _pooled(whole, heads=heads, groups=kv_heads))
    # All attention, also that which reads keys of another block (Gemma 3n).
    for module in decoder_blocks(causal).modules():
        if hasattr(module, "num_key_value_groups"):
            module.num_key_value_groups *= heads // kv_heads
        if hasattr(module, "num_key_value_heads"):
            module.num_key_value_heads = kv_heads
    config.num_key_value_heads = kv_heads
    _require_loads_again(causal)
    return model


def _pooled(linear: nn.Linear, *, heads: int, groups: int) -> nn.Linear:
    """The projection of keys or values with fewer heads; it trains if the given one does."""
    features = linear.out_features // heads * groups
    options = {"device": linear.weight.device, "dtype": linear.weight.dtype}
    pooled = nn.Linear(linear.in_features, features, bias=linear.bias is not None, **options)
    for name, parameter in linear.named_parameters():
        fewer = mean_of_groups(parameter, heads=heads, groups=groups)
        setattr(pooled, name, nn.Parameter(fewer, requires_grad=parameter.requires_grad))
    return pooled.train(linear.training)


def cache_bytes(cache: Any) -> int:
    """Bytes of the cache that grouped heads leave: of the `past_key_values` of transformers."""
    tensors = []
    for layer in cache.layers:
        tensors += [layer.keys.contiguous(), layer.values.contiguous()]
    return storage_bytes(tensors)


# --- Hugging Face glue and guards -----------------------------------------------------------------


def _grouped_attentions(causal: Any) -> dict[str, nn.Module]:
    """The attention layers of the blocks, whose heads of keys can be pooled, by name."""
    inside = {id(module) for module in decoder_blocks(causal).modules()}
    found = {}
    for name, module in causal.named_modules():
        has_both = all(hasattr(module, projection) for projection in PROJECTIONS)
        if id(module) in inside and has_both:
            found[name] = module
    return found


def _check_heads(name: str, attention: nn.Module, heads: int) -> None:
    """Heads of a group are neighbours: in MiMo-V2-Flash some blocks have twice as many heads."""
    features = attention.k_proj.out_features
    head_dim = getattr(attention, "head_dim", features // heads)
    if features != heads * head_dim:
        raise ValueError(
            f"{name} has {features / head_dim:g} heads of keys, and the configuration {heads}: a "
            f"model whose blocks have different numbers of heads cannot be pooled"
        )


def _require_loads_again(causal: Any) -> None:
    """A norm for each pooled head of keys (StableLM) would stay: no file would load again."""
    with torch.device("meta"):
        twin = type(causal)(copy.deepcopy(causal.config))
    ours = {name: parameter.shape for name, parameter in causal.named_parameters()}
    expected = {name: parameter.shape for name, parameter in twin.named_parameters()}
    wrong = [name for name in {**ours, **expected} if ours.get(name) != expected.get(name)]
    if wrong:
        raise ValueError(
            f"{wrong[0]} depends on the number of heads, too, or is not in a model of its "
            f"configuration"
        )


# --- the arithmetic -------------------------------------------------------------------------------


def predicted_cache_bytes(
    model: Any, *, tokens: int, batch: int = 1, kv_heads: int | None = None
) -> int:
    """Bytes of the cache of grouped heads after `tokens` tokens: 2 x layers x B x G x T x E.

    A layer with a sliding window keeps one token less than its window.

    Args:
        kv_heads: G; None takes that of the model as it is.
    """
    causal = without_adapters(model)
    config = causal.config.get_text_config()
    if kv_heads is None:
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None)
    if head_dim is None:
        head_dim = config.hidden_size // config.num_attention_heads
    kept = sum(_tokens_with_keys(config, tokens))
    return 2 * batch * kv_heads * kept * head_dim * causal.dtype.itemsize


def _tokens_with_keys(config: Any, tokens: int) -> list[int]:
    """Grouped-query attention keeps keys and values of so many tokens, layer by layer."""
    window = getattr(config, "sliding_window", None)
    if window is None:
        return [tokens] * config.num_hidden_layers
    with_window = min(tokens, window - 1)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:  # then all layers have the window
        return [with_window] * config.num_hidden_layers
    return [with_window if kind == "sliding_attention" else tokens for kind in kinds]
