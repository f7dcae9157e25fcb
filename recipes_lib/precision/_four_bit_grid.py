"""Weights on a grid of four bits: 16 levels, and a scale and an offset for each group of a row.

    weight ≈ (level - 8) * scale + offset       level 0 … 15, so `offset` is the value of level 8

A group is `group` weights beside each other in a row of `[out, in]`: weights of one output, which
read neighbouring inputs. Two grids are common:

    asymmetric   from the smallest to the largest weight of the group    16 levels in use
    symmetric    around zero: offset 0, scale = largest |weight| / 7     15 levels in use

Scales and offsets are bf16, as the kernels read them: two bytes each, so a weight takes
4 bits + 32 bits / group. The levels are chosen for the *rounded* scale and offset. Chosen for the
exact ones, they would not be the nearest levels of the grid that is stored.

O outputs, I inputs, G = I / group groups of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from recipes_lib.core.checks import check_choice

GROUPS = (32, 64, 128)  # weights that share a scale
MIDDLE = 8  # the level that stands for the offset itself


class FourBitGrid(NamedTuple):
    """A weight as its levels of four bits, and what they mean."""

    levels: Tensor  # uint8 [O, I], each 0 … 15
    scales: Tensor  # bf16 [O, G]
    offsets: Tensor  # bf16 [O, G]

    def weight(self) -> Tensor:
        """The weights that the levels of four bits stand for, in fp32 [O, I]."""
        in_groups = self.levels.view(*self.scales.shape, -1).float() - MIDDLE  # [O, G, group]
        values = in_groups * self.scales[..., None].float() + self.offsets[..., None].float()
        return values.view(self.levels.shape)


def to_four_bits(weight: Tensor, *, group: int, symmetric: bool = False) -> FourBitGrid:
    """The nearest levels of four bits to `weight` [O, I]."""
    steps, scales, offsets = _nearest_steps_from_offset(weight, group, symmetric)
    levels = (steps + MIDDLE).to(torch.uint8).flatten(1)
    return FourBitGrid(levels, scales, offsets)


def in_four_bits(weight: Tensor, *, group: int, symmetric: bool = False) -> Tensor:
    """What is left of `weight` [O, I] in four bits, fp32: `to_four_bits(…).weight()`, faster."""
    steps, scales, offsets = _nearest_steps_from_offset(weight, group, symmetric)
    return steps.mul_(scales[..., None]).add_(offsets[..., None]).flatten(1)


def _nearest_steps_from_offset(
    weight: Tensor, group: int, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Four-bit steps from the offset, -8 … 7 in fp32 [O, G, group]; scales, offsets bf16 [O, G]."""
    groups = weight.detach().float().unflatten(1, (-1, group))  # [O, G, group]
    low = groups.amin(dim=-1)
    high = groups.amax(dim=-1)
    if symmetric:
        scales = (torch.maximum(high, -low) / 7).bfloat16()
        offsets = torch.zeros_like(scales)
    else:
        scales = ((high - low) / 15).bfloat16()
        offsets = (low + MIDDLE * scales.float()).bfloat16()
    # A group of equal weights has the scale 0: they are the offset, whatever they are divided by.
    divisors = scales.float().where(scales > 0, torch.ones_like(low))
    steps = (groups - offsets[..., None].float()).div_(divisors[..., None])
    return steps.round_().clamp_(-MIDDLE, 15 - MIDDLE), scales, offsets


def check_groups(layers: Mapping[str, nn.Linear], names: Iterable[str], group: int) -> None:
    """Raise ValueError unless four bits have this `group`, which divides the width of layers."""
    check_choice(GROUPS, group=group)
    for name in names:
        width = layers[name].in_features
        fitting = [size for size in GROUPS if width % size == 0]
        if group not in fitting:
            raise ValueError(
                f"{name} has {width} inputs, which group={group} does not divide: leave it out "
                f"(`names`), or give another group (of {list(GROUPS)}, {fitting} fit)"
            )
