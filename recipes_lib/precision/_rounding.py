"""Stochastic rounding: from fp32 to one of the two bf16 neighbours, right on average.

An optimizer that stores numbers in bf16 changes them by less than the spacing of bf16. Rounded to
nearest such a change disappears, in every step. Rounded stochastically it happens sometimes:

    a weight of 1 has the neighbours 0.9961 and 1.0078, and the step asks for 0.9999

    to nearest       1, every time
    stochastically   0.9961 in 1 of 39 steps, else 1: 0.9999 on average
"""

from __future__ import annotations

import math

import torch

from recipes_lib.core.model.sizes import parts_needed

UPPER_HALF = -(2**16)  # as int32: the 16 upper bits are 1, the lower ones 0


def stochastic_round(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Round fp32 to one of the two bf16 neighbours, to the nearer more often.

    Args:
        values: fp32 [N]; bits: int32 [N] from `random_bits`.
    """
    return stochastic_round_(values.clone(), bits).to(torch.bfloat16)


def stochastic_round_(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Round in place. The values stay fp32 and are now such that bf16 can represent them.

    bf16 is the upper half of fp32. A random number below 2**16, added to the whole, carries into
    the upper half with the probability (lower half) / 2**16; then the lower half is cut off. So
    over all `bits` the mean is the value. What bf16 can represent stays, infinities and NaN
    included. Above its largest number the upper neighbour is infinity, as in rounding to nearest.

    Args:
        values: fp32 [N]; bits: int32 [N] from `random_bits`.
    """
    # CUDA's NaN has all bits set: a carry would turn it into -0. Python's NaN, which this writes
    # in its place, has a lower half of zeros.
    values.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=-math.inf)
    raw = values.view(torch.int32)
    raw += bits
    raw &= UPPER_HALF
    return values


def random_bits(count: int, *, generator: torch.Generator) -> torch.Tensor:
    """Draw `count` int32 numbers from 0 to 2**16 - 1 on the generator's device."""
    # Four of them come from each 64-bit number.
    words = torch.empty(parts_needed(count, 4), dtype=torch.int64, device=generator.device)
    words.random_(-(2**63), None, generator=generator)
    return words.view(torch.uint16)[:count].to(torch.int32)
