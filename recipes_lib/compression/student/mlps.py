"""The MLP of a block: its channels, and which rows and columns belong to a channel.

Part of student. An MLP is known by the names of its layers:

    Llama, Qwen, Mistral, Gemma    gate_proj, up_proj [F, D]    down_proj [D, F]
    Phi-3                          gate_up_proj [2F, D]         down_proj [D, F]
    GPT-2                          c_fc [D, F] (Conv1D)         c_proj [F, D] (Conv1D)
    GPT-NeoX                       dense_h_to_4h [F, D]         dense_4h_to_h [D, F]
    Phi, OPT                       fc1 [F, D]                   fc2 [D, F]

Shapes: D hidden, F channels of the feed-forward, K of them kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from recipes_lib.core.model.causal_lm import EXPERTS, ROUTERS, leaf_names
from recipes_lib.core.predict.plain_step import features, is_linear

# Which layers make the channels, how many rows each has for a channel, and which reads them.
KNOWN_MLPS = (
    (("gate_proj", "up_proj"), 1, "down_proj"),
    (("gate_up_proj",), 2, "down_proj"),
    (("c_fc",), 1, "mlp.c_proj"),
    (("dense_h_to_4h",), 1, "dense_4h_to_h"),
    (("fc1",), 1, "fc2"),
)


@dataclass(frozen=True)
class Mlp:
    """The feed-forward of a block, by the names of its layers inside the block."""

    into: dict[str, nn.Module]  # what makes the channels
    rows_per_channel: int  # of each of these layers
    out_name: str
    out: nn.Module  # what reads them

    @property
    def channels(self) -> int:
        """F."""
        return features(self.out)[0]

    def out_norms(self) -> torch.Tensor:
        """The length of each channel's column in the layer that reads it: fp32 [F]."""
        weight = self.out.weight.detach().float()
        other_dim = 1 if _is_transposed(self.out) else 0
        return weight.norm(dim=other_dim)

    def parameters_per_channel(self) -> int:
        """Parameters that go with one channel."""
        count = features(self.out)[1]
        for layer in self.into.values():
            count += self.rows_per_channel * features(layer)[0]
            if layer.bias is not None:
                count += self.rows_per_channel
        return count

    def narrowed(self, name: str, tensor: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """A tensor of the block, by its name inside, with the `kept` [K] channels alone."""
        kept = kept.to(tensor.device)
        layer, _, kind = name.rpartition(".")
        if layer == self.out_name and kind == "weight":
            channel_dim = 0 if _is_transposed(self.out) else 1
            return tensor.index_select(channel_dim, kept)
        if layer not in self.into:
            return tensor
        # Of stacked layers, such as gate and up in one, each has its channels in rows of its own.
        rows = torch.cat([kept + part * self.channels for part in range(self.rows_per_channel)])
        channel_dim = 0
        if kind == "weight" and _is_transposed(self.into[layer]):
            channel_dim = 1
        return tensor.index_select(channel_dim, rows)


def _is_transposed(layer: nn.Module) -> bool:
    """Conv1D stores its weight as [in, out], a linear layer as [out, in]."""
    return not isinstance(layer, nn.Linear)


def mlp_of(block: nn.Module) -> Mlp:
    """The MLP of a block. Raises ValueError if its layers have none of the known names."""
    mixture = leaf_names(block) & (ROUTERS | EXPERTS)
    for into, rows, out in KNOWN_MLPS:
        found = linears_of(block, (*into, out))
        if found is not None and not mixture:
            out_name = list(found)[-1]
            reader = found.pop(out_name)
            return Mlp(found, rows, out_name, reader)
    raise ValueError(
        f"the MLP of {type(block).__name__} has none of the known forms "
        f"(gate_proj, up_proj, down_proj; c_fc, c_proj; …): leave its channels as they are"
    )


def linears_of(block: nn.Module, endings: Sequence[str]) -> dict[str, nn.Module] | None:
    """The linear layers whose names end so, in this order; None unless there is one for each."""
    layers = {name: module for name, module in block.named_modules() if is_linear(module)}
    found = [_ending(layers, ending) for ending in endings]
    if not all(found):
        return None
    return {name: layers[name] for name in found}


def _ending(names: Iterable[str], ending: str) -> str | None:
    """The one name that is `ending`, or ends with it after a dot."""
    found = [name for name in names if f".{name}".endswith(f".{ending}")]
    if len(found) == 1:
        return found[0]
    return None
