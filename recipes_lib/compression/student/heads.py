"""Attention heads: what each group of them adds, and which rows and columns belong to a group.

Part of student. Where several heads of queries read the same keys and values (GQA), they are a
group, and go together with them:

    q_proj   E rows for each of R heads of a group      k_proj, v_proj   E rows for each group
    o_proj   R E columns for each group

The outputs of a group's heads, a [R E], are multiplied with these columns W. Without the group, the
output of the layer changes by W a, so

    importance of a group = mean |W a|² = sum over W * (W mean(a aᵀ))

The mean of a aᵀ is a small matrix, and all that is kept of the text. The forms that are known:

    Llama, Qwen, Mistral, Gemma    q_proj, k_proj, v_proj    o_proj
    Phi-3                          qkv_proj, stacked         o_proj
    Phi                            q_proj, k_proj, v_proj    dense

Shapes: T positions, D hidden, G groups, R heads of queries in each, E features of a head.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from recipes_lib.compression.student.choice import largest
from recipes_lib.compression.student.mlps import linears_of
from recipes_lib.compression.student.watch import watch
from recipes_lib.core.model.causal_lm import decoder_blocks, require_causal_lm

# Which layers make queries, keys and values, and which one reads the outputs of the heads.
SEPARATE = ("q_proj", "k_proj", "v_proj")
KNOWN_ATTENTIONS = ((SEPARATE, "o_proj"), (("qkv_proj",), "o_proj"), (SEPARATE, "dense"))

# --- the idea: what a learner can copy ------------------------------------------------------------


def plain_head_importance(outputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Of groups with these outputs [T, G, R E], read by weight [D, G R E]: [G]."""
    columns = weight.view(len(weight), *outputs.shape[1:])  # [D, G, R E]
    added = torch.einsum("tge,dge->tgd", outputs, columns)  # what each group adds
    return added.square().sum(dim=-1).mean(dim=0)


# --- the technique --------------------------------------------------------------------------------


def head_importance(model: Any, batches: Iterable[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    """What each group of heads adds to its block's attention: mean |W a|², fp32 [G] per block.

    Positions count as in `block_influence`. Raises ValueError as it does, and for attention whose
    parts are unknown.
    """
    require_causal_lm(model)
    attentions = [attention_of(block, model.config) for block in decoder_blocks(model)]
    sums = [torch.zeros(1)] * len(attentions)

    def add(number: int, outputs: torch.Tensor, _output: torch.Tensor) -> None:
        grouped = outputs.float().unflatten(-1, (attentions[number].groups, -1))  # [T, G, R E]
        products = torch.einsum("tge,tgf->gef", grouped, grouped)
        sums[number] = sums[number].to(products.device) + products

    positions = watch(model, [attention.out for attention in attentions], batches, add)
    importance = []
    for total, attention in zip(sums, attentions):
        columns = attention.out.weight.detach().float().unflatten(1, (attention.groups, -1))
        importance.append(torch.einsum("dge,gef,dgf->g", columns, total / positions, columns))
    return importance


def choose_heads(importance: Sequence[torch.Tensor], *, keep: int) -> list[torch.Tensor]:
    """For each block the numbers of its `keep` most important groups of heads, in rising order.

    Raises ValueError for importance that is no list of tensors [G], as `head_importance` makes it,
    and for `keep` outside 1 … number of groups.
    """
    return largest(importance, keep=keep, made_by="head_importance")


@dataclass(frozen=True)
class Attention:
    """The attention of a block, by the names of its layers inside the block."""

    into: dict[str, tuple[int, ...]]  # for each layer, the heads that a group has in its parts
    out_name: str
    out: nn.Linear  # what reads the outputs of the heads
    groups: int
    head_dim: int

    def rows(self, name: str, kept: torch.Tensor) -> torch.Tensor:
        """The rows that groups `kept` have in the layer `name`, its stacked parts one by one."""
        found = []
        first = 0
        for heads in self.into[name]:
            of_part = self.groups * heads * self.head_dim
            rows_of_groups = torch.arange(first, first + of_part).view(self.groups, -1)
            found.append(rows_of_groups[kept].flatten())
            first += of_part
        return torch.cat(found)

    def columns(self, kept: torch.Tensor) -> torch.Tensor:
        """The columns that groups `kept` have in the layer that reads them."""
        columns_of_groups = torch.arange(self.out.in_features).view(self.groups, -1)
        return columns_of_groups[kept].flatten()

    def narrowed(self, name: str, tensor: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """A tensor of the block, by its name inside, with the groups `kept` alone."""
        layer, _, kind = name.rpartition(".")
        if layer == self.out_name and kind == "weight":
            return tensor.index_select(1, self.columns(kept).to(tensor.device))
        if layer not in self.into:
            return tensor
        return tensor.index_select(0, self.rows(layer, kept).to(tensor.device))

    def parameters_per_group(self, block: nn.Module) -> int:
        """Parameters of the block that go with one group."""
        count = self.out.out_features * self.out.in_features // self.groups
        for name in self.into:
            layer = block.get_submodule(name)
            count += sum(tensor.numel() for tensor in layer.parameters()) // self.groups
        return count


# --- Hugging Face glue and guards -----------------------------------------------------------------


def attention_of(block: nn.Module, config: Any) -> Attention:
    """The attention of a block. Raises ValueError if its layers are of none of the known forms."""
    config = config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        raise ValueError(f"{type(block).__name__} has no heads of attention to choose from")
    groups = getattr(config, "num_key_value_heads", None) or heads
    try:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    except RuntimeError:  # transformers refuses one number for layers that have different ones
        raise ValueError(
            f"the heads of {type(block).__name__} are wider in some layers than in others: leave "
            f"its heads as they are"
        ) from None
    of_queries = heads // groups
    for into, out in KNOWN_ATTENTIONS:
        found = linears_of(block, (*into, out))
        if found is None:
            continue
        *names, out_name = found
        parts = [(of_queries,), (1,), (1,)]
        if len(names) == 1:
            parts = [(of_queries, 1, 1)]
        attention = Attention(
            into=dict(zip(names, parts)),
            out_name=out_name,
            out=found[out_name],
            groups=groups,
            head_dim=head_dim,
        )
        if _fits(attention, found):
            return attention
    raise ValueError(
        f"the attention of {type(block).__name__} has none of the known forms "
        f"(q_proj, k_proj, v_proj, o_proj; qkv_proj, o_proj; …): leave its heads as they are"
    )


def _fits(attention: Attention, layers: dict[str, nn.Module]) -> bool:
    """Whether the layers are as wide as the heads of the configuration say."""
    per_head = attention.groups * attention.head_dim
    of_queries = next(iter(attention.into.values()))[0]
    fits = attention.out.in_features == of_queries * per_head
    for name, parts in attention.into.items():
        fits = fits and layers[name].out_features == sum(parts) * per_head
    return fits


def with_fewer_heads(config: Any, *, groups: int) -> None:
    """Let `config` describe attention with so many groups of heads, each as wide as before.

    Raises ValueError if its class does not allow that number.
    """
    heads = config.num_attention_heads
    before = getattr(config, "num_key_value_heads", None) or heads
    # Without a width of its own, a head would become wider: hidden size by the number of heads.
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    config.num_attention_heads = heads // before * groups
    config.num_key_value_heads = groups
    try:
        type(config)(**config.to_dict())
    except Exception as error:  # each family has a class of its own for what it does not allow
        raise ValueError(
            f"{type(config).__name__} does not allow {config.num_attention_heads} heads for hidden "
            f"states of {config.hidden_size} features: keep another number of groups than {groups}"
        ) from error
