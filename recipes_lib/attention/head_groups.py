"""Attention by groups of heads: one group at a time is projected, attends, and is projected back.

Problem    With long rows, attention holds Q, K, V and its output for all heads at once: [S, D] each
           of Q and the output, and in backward the gradients of all four beside them. When blocks
           are checkpointed and the MLP works in tiles, this is the peak.
Idea       Heads do not read each other. The output layer of attention only sums what they give:

               forward    for each group g of KV heads, with the query heads that read them:
                              y += attention(x Wq[g], x Wk[g], x Wv[g]) Wo[g]
               backward   for each group g: the same again, and its gradients
Saves      Beside x and y, all but one group's share of what attention holds. For the shape of
           Llama 3.1 8B with checkpointed blocks and tiled MLP and norms, a dry step counts 7.1
           tensors [S, D] at the peak of a block instead of 8.6, and 9.6 with adapters. With them,
           QLoRA of 262,144 tokens fits a card of 24 GB by a dry run: docs/long-card.md.
Costs      The forward of attention once more in backward, as each group is recomputed. Smaller
           products. In 16 bits the sum over the groups rounds once per group. Weights in four bits
           are unpacked once per group. Dropout draws other numbers.
Use when   Rows are so long that one block does not fit, and its MLP is tiled already.
Not when   Time matters more; heads read each other (a norm over all of them); adapters have
           dropout.
In production   none in transformers; DeepSpeed's Ulysses and its kin split the heads over GPUs
           instead, as `parallel.context_parallel` explains.
Source     The heads of Vaswani et al., arXiv 1706.03762; recomputation as in Chen et al., arXiv
           1604.06174.

Shapes: B batch, S sequence, D hidden, G groups, E head dimension.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes_lib.core.measure.machine import require
from recipes_lib.core.model.caches_of_checkpointed_blocks import (
    caches_among,
    generates,
    without_caches,
)
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.core.model.mixins import mix_in
from recipes_lib.core.model.probe import proves
from recipes_lib.core.model.recomputed_parts import (
    needs_backward,
    refuse_selective_checkpointing,
    run_recomputed_parts,
)

INPUTS = ("q_proj", "k_proj", "v_proj")  # their rows are heads
OUTPUT = "o_proj"  # its columns are heads
# What some families keep on the module, and what a group has a part of.
COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads")

# --- the idea: what a learner can copy ------------------------------------------------------------


def attention_by_groups(
    x: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, *, heads: int, groups: int
) -> Tensor:
    """Causal attention over x [S, D], a group of heads at a time. Weights are [out, in]: [S, D].

    `heads` is how many heads the queries have; keys and values may have fewer.
    """
    head_dim = query.shape[0] // heads  # E
    y = torch.zeros_like(x)
    # Rows of the weights belong to heads, so a group of heads is a slice of rows.
    slices = zip(query.chunk(groups), key.chunk(groups), value.chunk(groups))
    for (q_rows, k_rows, v_rows), o_columns in zip(slices, output.chunk(groups, dim=1)):
        q = (x @ q_rows.T).unflatten(-1, (-1, head_dim)).transpose(0, 1)  # [heads / G, S, E]
        k = (x @ k_rows.T).unflatten(-1, (-1, head_dim)).transpose(0, 1)
        v = (x @ v_rows.T).unflatten(-1, (-1, head_dim)).transpose(0, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y += mixed.transpose(0, 1).flatten(1) @ o_columns.T
    return y


# --- the technique --------------------------------------------------------------------------------


@proves("exact")
def apply_head_groups(model: Any, *, groups: int | None = None) -> Any:
    """Let attention of every block work on one group of heads after the other. Returns `model`.

    It works with any kernel of attention, with adapters of LoRA and with weights in four bits;
    those come before, checkpointing after. While the model generates with a cache, attention runs
    as before. Blocks without attention stay as they are.

    Args:
        groups: how many. It has to divide the number of KV heads. None takes one KV head a group.
    """
    attentions = _attentions_of_blocks(model)
    groups = _number_of_groups(model, groups)
    for attention in attentions:
        mix_in(attention, InHeadGroups, head_groups=groups)
    return model


class InHeadGroups:
    """What is mixed into the class of an attention layer."""

    head_groups: int

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """What attention does with all heads, by groups: [B, S, D] -> ([B, S, D], no weights)."""
        has_cache = len(caches_among(args, kwargs)) > 0
        if has_cache and generates(self, args, kwargs):
            return super().forward(hidden_states, *args, **kwargs)
        args, kwargs = without_caches(args, kwargs, index=getattr(self, "layer_idx", 0))
        of_all_heads = super().forward.__func__

        def of_group(group: int, hidden: Tensor) -> Tensor:
            attention = of_one_group(self, group, self.head_groups)
            return of_all_heads(attention, hidden, *args, **kwargs)[0]

        total = _Sum()
        if needs_backward(self, hidden_states):
            refuse_selective_checkpointing(parts="groups", mixin=InHeadGroups)
            same_for_all = partial(_once_for_each_group, times=self.head_groups)
            run_recomputed_parts(of_group, hidden_states, split=same_for_all, take=total.add)
        else:
            for group in range(self.head_groups):
                total.add(of_group(group, hidden_states))
        return total.value, None


class _Sum:
    """A sum that grows in place: beside it there is one summand."""

    value: Tensor | None = None

    def add(self, summand: Tensor) -> None:
        if self.value is None:
            self.value = summand.clone()  # a tensor that nobody else reads
        else:
            self.value.add_(summand)


def _once_for_each_group(hidden: Tensor, *, times: int) -> list[Tensor]:
    return [hidden] * times


# --- a layer with some of its heads ---------------------------------------------------------------


def of_one_group(attention: nn.Module, group: int, groups: int) -> nn.Module:
    """A stand-in for `attention` that has the heads of one group only."""
    stand_in = copy.copy(attention)
    own = vars(stand_in)  # a dictionary of its own; names in it come before those of modules
    for name in INPUTS:
        projection = getattr(attention, name)
        own[name] = partial(
            _some_rows, projection, _share_of_group(projection.out_features, group, groups)
        )
    projection = getattr(attention, OUTPUT)
    columns = _share_of_group(projection.in_features, group, groups)
    # The bias is added once, with the first group.
    own[OUTPUT] = partial(_some_columns, projection, columns, with_bias=group == 0)
    for name in COUNTS:
        if isinstance(own.get(name), int):
            own[name] = own[name] // groups
    return stand_in


def _share_of_group(features: int, group: int, groups: int) -> slice:
    size = features // groups
    return slice(group * size, (group + 1) * size)


def _some_rows(projection: nn.Module, rows: slice, x: Tensor) -> Tensor:
    """What a group of heads gets of a projection, its outputs `rows`: [B, S, D] -> [B, S, rows]."""
    base = getattr(projection, "base_layer", projection)
    bias = base.bias
    if bias is not None:
        bias = bias[rows]
    y = _product_of_rows(base, x, plain_weight_of(base)[rows], bias)
    if base is projection:
        return y
    down, up, scaling = _adapter(projection)
    return y.add_(F.linear(_small(x, down, scaling), up[rows]))


def _some_columns(projection: nn.Module, columns: slice, x: Tensor, *, with_bias: bool) -> Tensor:
    """What a group of heads gives to a projection, its inputs `columns`: -> [B, S, D]."""
    base = getattr(projection, "base_layer", projection)
    bias = None
    if with_bias:
        bias = base.bias
    y = _product_of_rows(base, x, plain_weight_of(base)[:, columns], bias)
    if base is projection:
        return y
    down, up, scaling = _adapter(projection)
    return y.add_(F.linear(_small(x, down[:, columns], scaling), up))


def _product_of_rows(base: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x times the rows of `weight` of a group of heads, as the whole layer does it."""
    if not _in_four_bits(base):
        return F.linear(x, weight, bias)
    dtype = x.dtype
    if base.compute_type_is_set:
        dtype = base.compute_dtype
    if bias is not None:
        bias = bias.to(dtype)
    return F.linear(x.to(dtype), weight.to(dtype), bias).to(x.dtype)


def _small(x: Tensor, down: Tensor, scaling: float) -> Tensor:
    """What an adapter hands on to a group of heads: [B, S, r], scaled while it is small."""
    return scaling * F.linear(x.to(down.dtype), down)


def _adapter(projection: Any) -> tuple[Tensor, Tensor, float]:
    """The adapter that groups of heads divide: its matrices [r, in] and [out, r], and its scale."""
    (name,) = projection.active_adapters
    down = projection.lora_A[name].weight  # [r, in]
    up = projection.lora_B[name].weight  # [out, r]
    return down, up, projection.scaling[name]


def plain_weight_of(base: nn.Module) -> Tensor:
    """The weight [out, in] of which groups of heads take rows; one in four bits is unpacked."""
    if not _in_four_bits(base):
        return base.weight
    functional = require("bitsandbytes").functional
    return functional.dequantize_4bit(base.weight.data, base.weight.quant_state)


def _in_four_bits(base: nn.Module) -> bool:
    return getattr(base.weight, "quant_state", None) is not None


# --- Hugging Face glue and guards -----------------------------------------------------------------


def _attentions_of_blocks(model: Any) -> list[nn.Module]:
    """The attention layers of the blocks, which are to work by groups of heads."""
    found = []
    for block in decoder_blocks(model):
        for module in block.children():
            if all(hasattr(module, name) for name in (*INPUTS, OUTPUT)):
                found.append(module)
    if not found:
        raise ValueError(
            f"no attention has {', '.join(INPUTS)} and {OUTPUT}, so its heads cannot be told apart"
        )
    for attention in found:
        for part in attention.modules():
            dropouts = getattr(part, "lora_dropout", {}).values()
            if any(getattr(dropout, "p", 0) > 0 for dropout in dropouts):
                raise ValueError("an adapter with dropout would differ from group to group")
    return found


def _number_of_groups(model: Any, groups: int | None) -> int:
    """How many groups: as given, or one for each KV head."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if groups is None:
        return heads
    if heads % groups != 0:
        raise ValueError(
            f"groups={groups}: the model has {heads} KV heads; give a number that divides them"
        )
    return groups
