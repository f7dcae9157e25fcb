"""Rounding that trains: forward on the grid, and gradients as if nothing had been rounded.

Part of quantization_aware: activations on their grids, and products of what was rounded. Backward
rounds once more instead of keeping what forward has rounded: it keeps the weight and the input,
which a plain layer keeps as well.

Shapes: [..., K] inputs of a linear layer, W weight [N, K].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from recipes_lib.core.model.integer_grid import SMALLEST_SCALE, inside_grid, levels_of, on_grid
from recipes_lib.core.model.second_derivatives import first_derivatives_only


class Steps(NamedTuple):
    """How far numbers are from the lowest level, in whole steps, before they are cut off."""

    steps: Tensor  # fp32, the shape of the numbers
    scale: Tensor
    zero: Tensor  # the level that means zero

    def inside(self, bits: int) -> Tensor:
        """Which numbers have a level of their own: bool."""
        low, high = levels_of(bits)
        return (self.steps >= low) & (self.steps <= high)

    def rounded_(self, bits: int) -> Tensor:
        """What the levels mean, in fp32, in the place of the steps."""
        return self.steps.clamp_(*levels_of(bits)).sub_(self.zero).mul_(self.scale)


# --- activations ----------------------------------------------------------------------------------


def token_steps(x: Tensor, bits: int) -> Steps:
    """Each token of x [..., K] on a grid from its smallest to its largest number."""
    x = x.detach().float()
    # In 16 bits a level of 8 bits would be missed by rounding: all of this is fp32.
    return _steps(x, x.amin(dim=-1, keepdim=True), x.amax(dim=-1, keepdim=True), bits)


def range_steps(x: Tensor, limits: Tensor, bits: int) -> Steps:
    """All of x on one grid, between the two `limits` [2]."""
    return _steps(x.detach().float(), limits[0], limits[1], bits)


def _steps(x: Tensor, low: Tensor, high: Tensor, bits: int) -> Steps:
    lowest, highest = levels_of(bits)
    low = low.clamp(max=0)  # zero is one of the levels
    high = high.clamp(min=0)
    scale = ((high - low) / (highest - lowest)).clamp(min=SMALLEST_SCALE)
    zero = (lowest - (low / scale).round()).clamp(lowest, highest)
    return Steps((x * (1.0 / scale)).round_().add_(zero), scale, zero)


class RoundedInRange(torch.autograd.Function):
    """x on one grid between `limits` [2]. What lies outside gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, limits: Tensor, bits: int) -> Tensor:
        """x, rounded, in its dtype."""
        limits = limits.clone()  # that of this step: a later one moves it
        ctx.save_for_backward(x, limits)
        ctx.bits = bits
        return range_steps(x, limits, bits).rounded_(bits).to(x.dtype)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of x, and none for the others."""
        x, limits = ctx.saved_tensors
        return gradient * range_steps(x, limits, ctx.bits).inside(ctx.bits), None, None


# --- weights --------------------------------------------------------------------------------------


class RoundedWeight(torch.autograd.Function):
    """A weight on its grid, in fp32. A weight that is cut off at the end gets no gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bits: int, group: int | None) -> Tensor:
        """`weight`, rounded, in its dtype."""
        ctx.save_for_backward(weight)
        ctx.grid = {"bits": bits, "group": group}
        return on_grid(weight, **ctx.grid).to(weight.dtype)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the weight, and none for the others."""
        (weight,) = ctx.saved_tensors
        return gradient * inside_grid(weight, **ctx.grid), None, None


class RoundedLinear(torch.autograd.Function):
    """x W^T of rounded tokens and a rounded weight, in the dtype of autocast or of x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bits: int,
        group: int | None,
        activation_bits: int | None,
    ) -> Tensor:
        """[..., K] -> [..., N]."""
        ctx.dtype = x.dtype
        device = x.device.type
        if torch.is_autocast_enabled(device):
            ctx.dtype = torch.get_autocast_dtype(device)
        ctx.bits = bits
        ctx.group = group
        ctx.activation_bits = activation_bits
        ctx.save_for_backward(x, weight)
        with torch.autocast(device, enabled=False):
            rounded = on_grid(weight, bits=bits, group=group).to(ctx.dtype)
            return rounded_tokens(x, activation_bits).to(ctx.dtype) @ rounded.T

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x and of the weight, and none for the others."""
        x, weight = ctx.saved_tensors
        tokens = x
        inside = None
        if ctx.activation_bits is not None:
            steps = token_steps(x, ctx.activation_bits)
            inside = steps.inside(ctx.activation_bits)
            tokens = steps.rounded_(ctx.activation_bits).to(x.dtype)
        of_x = None
        of_weight = None
        if ctx.needs_input_grad[0]:
            rounded = on_grid(weight, bits=ctx.bits, group=ctx.group).to(ctx.dtype)
            of_x = (gradient @ rounded).to(x.dtype)
            if inside is not None:
                of_x *= inside
            del rounded  # before there is the gradient of the weight
        if ctx.needs_input_grad[1]:
            rows = tokens.to(ctx.dtype).reshape(-1, tokens.shape[-1])  # [T, K], of one token too
            of_rows = gradient.reshape(-1, gradient.shape[-1])  # [T, N]
            of_weight = (of_rows.T @ rows).to(weight.dtype)
            of_weight *= inside_grid(weight, bits=ctx.bits, group=ctx.group)
        return of_x, of_weight, None, None, None


def rounded_tokens(x: Tensor, bits: int | None) -> Tensor:
    """x [..., K] with each token on its grid; as it is, where `bits` is None."""
    if bits is None:
        return x
    return token_steps(x, bits).rounded_(bits).to(x.dtype)
