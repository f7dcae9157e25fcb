"""Weights on a symmetric grid of whole numbers: few bits each, and a scale for each group of a row.

    weight ≈ level * scale        4 bits: level -8 … 7, scale = max |weight of the group| / 7.5
                                  b bits: level -2^(b-1) … 2^(b-1) - 1, scale = max / (2^(b-1) - ½)

The number of levels is even, and zero is one of them. So there is one more below zero than above.
The scale lets both ends miss the largest weight by half a step at most:

    max |w| = 7.5 scale     a largest weight above zero becomes  7, half a step too short
                            a largest weight below zero becomes -8 or -7: it is half-way between
                            them, and the last bit of the product decides

This is the grid of torchao's integer weights, which ExecuTorch takes, to the last bit. A weight
that was rounded and is rounded again lands on *another* grid, for its largest level is 8 or 7 and
no longer 7.5 steps away: what is to be quantized by another program goes there unrounded.

O outputs, I inputs, G = I / group groups of a row.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from recipes_lib.core.checks import check_whole

# What divides a group of zeros: the smallest number that fp32 holds in all its digits.
SMALLEST_SCALE = torch.finfo(torch.float32).smallest_normal


class IntegerGrid(NamedTuple):
    """A weight as its whole numbers, the levels, and what they mean."""

    levels: Tensor  # int8 [O, I], or [O, ...] of a convolution
    scales: Tensor  # fp32 [O, G]

    def weight(self) -> Tensor:
        """The weights that the whole numbers stand for, in fp32, in the shape of `levels`."""
        in_groups = _in_groups(self.levels, self.scales.shape[1]).float()  # [O, G, group]
        return (in_groups * self.scales[..., None]).view(self.levels.shape)


def to_grid(weight: Tensor, *, bits: int, group: int | None = None) -> IntegerGrid:
    """The nearest whole numbers: `weight` [O, I] of a linear layer, or [O, ...] of a convolution.

    Args:
        bits: of a level, from 2 to 8.
        group: weights beside each other in a row that share a scale. None: the whole row.
    """
    check_bits(bits=bits)
    weight = weight.detach()
    if not weight.isfinite().all():
        raise ValueError("the weight has values that are not finite: it cannot be quantized")
    steps, scales = _nearest_steps_around_zero(weight, bits, group)
    return IntegerGrid(steps.to(torch.int8).view(weight.shape), scales)


def on_grid(weight: Tensor, *, bits: int, group: int | None = None) -> Tensor:
    """What is left of `weight`, in fp32: `to_grid(…).weight()`, faster and without its checks."""
    steps, scales = _nearest_steps_around_zero(weight.detach(), bits, group)
    return steps.mul_(scales[..., None]).view(weight.shape)


def inside_grid(weight: Tensor, *, bits: int, group: int | None = None) -> Tensor:
    """Where rounding finds a level for `weight`, and does not have to cut it off: bool."""
    low, high = levels_of(bits)
    steps, _ = _steps_from_zero(weight.detach(), bits, group)
    # -8 … 7 is a distance of up to 7.5 from -0.5. One comparison makes one table of bool.
    middle = (low + high) / 2
    return (steps.sub_(middle).abs_() <= high - middle).view(weight.shape)


def levels_of(bits: int) -> tuple[int, int]:
    """The lowest and the highest whole number of a grid: -8 and 7 for 4 bits."""
    half = 2 ** (bits - 1)
    return -half, half - 1


def _nearest_steps_around_zero(
    weight: Tensor, bits: int, group: int | None
) -> tuple[Tensor, Tensor]:
    """The whole numbers of a grid in fp32 [O, G, group], and its scales [O, G]."""
    steps, scales = _steps_from_zero(weight, bits, group)
    return steps.clamp_(*levels_of(bits)), scales


def _steps_from_zero(weight: Tensor, bits: int, group: int | None) -> tuple[Tensor, Tensor]:
    """How many whole steps each weight is from zero, fp32 [O, G, group]; the scales [O, G].

    A largest weight above zero may be one step too many.
    """
    width = weight[0].numel()
    if group is None:
        group = width
    check_group_divides(width, group)
    low, high = levels_of(bits)
    groups = _in_groups(weight, width // group).float()  # [O, G, group]
    largest = torch.maximum(groups.amax(dim=-1), -groups.amin(dim=-1))  # [O, G]
    scales = (largest / ((high - low) / 2)).clamp_(min=SMALLEST_SCALE)
    # By a product, as torchao does it: a division finds other levels for the largest weights.
    return (groups * (1.0 / scales)[..., None]).round_(), scales


def _in_groups(weight: Tensor, groups: int) -> Tensor:
    """Weights for a grid, [O, ...] as [O, G, group]."""
    return weight.reshape(len(weight), groups, -1)


def check_bits(**given: int) -> None:
    """Raise ValueError unless each is a whole number of bits from 2 to 8."""
    check_whole(least=2, most=8, **given)


def check_group_divides(width: int, group: int, name: str = "the weight") -> None:
    """Raise ValueError unless the `group` of a grid divides `width`."""
    check_whole(group=group)
    if width % group != 0:
        raise ValueError(
            f"{name} has {width} inputs, which group={group} does not divide: give one that does, "
            f"such as group={math.gcd(width, group)}"
        )
