"""Which rows and columns of a block belong to a channel of its MLP, or to a group of its heads.

Part of student. A unit, a channel or a group, has rows in the layers that make it and columns in
the layer that reads it. Layers are known by their names:

    Llama, Qwen, Mistral, Gemma    gate_proj, up_proj           down_proj
    Phi-3                          gate_up_proj, stacked        down_proj
    GPT-2                          c_fc (Conv1D)                c_proj (Conv1D)
    GPT-NeoX                       dense_h_to_4h                dense_4h_to_h
    Phi, OPT                       fc1                          fc2

    Llama, Qwen, Mistral, Gemma    q_proj, k_proj, v_proj       o_proj
    Phi-3                          qkv_proj, stacked            o_proj
    Phi                            q_proj, k_proj, v_proj       dense

Where several heads of queries read the same keys and values (GQA), they are a group and go together
with them: q_proj has R E rows for a group of R heads of E features, k_proj and v_proj have E.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recipes_lib.core.model.causal_lm import EXPERTS, ROUTERS, leaf_names, projection_widths
from recipes_lib.core.model.linears import features, is_linear

# Names of the layers that make the channels, how many stacked parts each has, and of the reader.
KNOWN_MLPS = (
    (("gate_proj", "up_proj"), 1, "down_proj"),
    (("gate_up_proj",), 2, "down_proj"),
    (("c_fc",), 1, "mlp.c_proj"),
    (("dense_h_to_4h",), 1, "dense_4h_to_h"),
    (("fc1",), 1, "fc2"),
)
SEPARATE = ("q_proj", "k_proj", "v_proj")
KNOWN_ATTENTIONS = ((SEPARATE, "o_proj"), (("qkv_proj",), "o_proj"), (SEPARATE, "dense"))


@dataclass(frozen=True)
class Units:
    """The channels of an MLP or the groups of heads, by the names of their layers in the block."""

    count: int
    makers: dict[
        str, tuple[int, ...]
    ]  # for each layer, rows of a unit in each of its stacked parts
    reader_name: str
    reader: nn.Module

    def columns(self) -> Tensor:
        """The weight of the reader [D, count, columns of a unit], in fp32."""
        weight = self.reader.weight.detach().float()
        if _is_transposed(self.reader):
            weight = weight.T
        return weight.unflatten(1, (self.count, -1))

    def narrowed(self, block: nn.Module, name: str, tensor: Tensor, kept: Tensor) -> Tensor:
        """A tensor of the block, by its name inside, with the units `kept` [K] alone."""
        layer, _, kind = name.rpartition(".")
        if layer == self.reader_name and kind == "weight":
            numbers = _of_units(kept, start=0, each=features(self.reader)[0] // self.count)
            dim = 0 if _is_transposed(self.reader) else 1
        elif layer in self.makers:
            numbers = self._rows(layer, kept)
            dim = 1 if kind == "weight" and _is_transposed(block.get_submodule(layer)) else 0
        else:
            return tensor
        return tensor.index_select(dim, numbers.to(tensor.device))

    def _rows(self, layer: str, kept: Tensor) -> Tensor:
        """Of stacked parts, such as gate and up in one layer, each has rows of every unit."""
        found = []
        start = 0
        for each in self.makers[layer]:
            found.append(_of_units(kept, start=start, each=each))
            start += self.count * each
        return torch.cat(found)


def _of_units(kept: Tensor, *, start: int, each: int) -> Tensor:
    """The rows of the units `kept`, of which each has so many beside each other."""
    return (start + kept[:, None] * each + torch.arange(each)).flatten()


def mlp_of(block: nn.Module) -> Units:
    """The channels of a block's MLP. Raises ValueError if its layers have none of the names."""
    mixture = leaf_names(block) & (ROUTERS | EXPERTS)
    for names, parts, reader in KNOWN_MLPS:
        found = _linears(block, (*names, reader))
        if found and not mixture:
            *makers, reader_name = found
            channels = features(found[reader_name])[0]
            rows = dict.fromkeys(makers, (1,) * parts)
            return Units(channels, rows, reader_name, found[reader_name])
    raise ValueError(
        f"the MLP of {type(block).__name__} has none of the known forms "
        f"(gate_proj, up_proj, down_proj; c_fc, c_proj; …): leave its channels as they are"
    )


def attention_of(block: nn.Module, config: Any) -> Units:
    """The groups of heads of a block. Raises ValueError if its layers have none of the names."""
    config = config.get_text_config()
    for names, reader in KNOWN_ATTENTIONS:
        found = _linears(block, (*names, reader))
        if not found:
            continue
        *makers, reader_name = found
        groups = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        of_queries, of_keys, _ = projection_widths(config)
        of_group = (of_queries // groups, of_keys // groups, of_keys // groups)  # and of values
        rows = [of_group] if len(makers) == 1 else [(each,) for each in of_group]
        widths = [features(found[name])[1] for name in makers]
        if widths == [groups * sum(each) for each in rows]:
            return Units(groups, dict(zip(makers, rows)), reader_name, found[reader_name])
    raise ValueError(
        f"the attention of {type(block).__name__} has none of the known forms "
        f"(q_proj, k_proj, v_proj, o_proj; qkv_proj, o_proj; …): leave its heads as they are"
    )


def _linears(block: nn.Module, endings: Sequence[str]) -> dict[str, nn.Module]:
    """The linear layers whose names end so, in this order; none unless there is one for each."""
    layers = {name: module for name, module in block.named_modules() if is_linear(module)}
    found = {}
    for ending in endings:
        names = [name for name in layers if f".{name}".endswith(f".{ending}")]
        if len(names) != 1:
            return {}
        found[names[0]] = layers[names[0]]
    return found


def _is_transposed(layer: nn.Module) -> bool:
    """Conv1D stores its weight as [in, out], a linear layer as [out, in]."""
    return not isinstance(layer, nn.Linear)
