"""The layers of a model that trains on a grid, of one whose weights are on it, and their rounding.

Part of quantization_aware. Each is mixed into a layer, which keeps its name and its parameters:

    class      the weight of the layer             what its forward multiplies with
    Aware...   in full precision, and it trains    that weight, rounded in each forward
    Fixed...   rounded already, and frozen         that weight

Both round what they read, in the same way. So a converted layer gives the same numbers. A converted
embedding is a plain one: it reads rows of a table that is rounded.

Backward rounds once more: it keeps what a plain layer keeps, and not what forward has rounded.

Shapes: [..., K] inputs of a linear layer, W weight [N, K].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recipes_lib.core.model.integer_grid import SMALLEST_SCALE, inside_grid, levels_of, on_grid
from recipes_lib.core.model.second_derivatives import first_derivatives_only

KINDS = (nn.Linear, nn.Embedding, nn.Conv2d)
LIMITS = "activation_limits"  # the buffer of a convolution: its smallest and largest input
MOMENTUM = 0.05  # how far a step moves these limits towards its own

# --- linear layers --------------------------------------------------------------------------------


class AwareLinear:
    """A linear layer whose weight and tokens are rounded in each forward."""

    weight_bits: int
    group: int | None  # None: the whole row has one scale
    activation_bits: int | None

    def forward(self, x: Tensor) -> Tensor:
        y = RoundedLinear.apply(x, self.weight, self.weight_bits, self.group, self.activation_bits)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return y


class FixedLinear:
    """A linear layer whose weight is on its grid, and whose tokens are rounded as they come."""

    activation_bits: int | None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(rounded_tokens(x, self.activation_bits))


# --- embeddings -----------------------------------------------------------------------------------


class AwareEmbedding:
    """An embedding whose rows are rounded as they are read: each has a scale of its own."""

    weight_bits: int
    group: None

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of an embedding on their grid, with gradients."""
        rows = nn.Embedding.forward(self, ids)
        flat = RoundedWeight.apply(rows.flatten(0, -2), self.weight_bits, None)
        rounded = flat.view_as(rows)
        factor = getattr(self, "embed_scale", None)
        if factor is None:
            return rounded
        # Gemma's. Behind it a number half-way between two levels may go to the other one.
        if isinstance(factor, Tensor):
            factor = factor.to(rounded.dtype)
        return rounded * factor


# --- convolutions ---------------------------------------------------------------------------------


class InputInRange:
    """What both kinds of convolution have: one grid for all of their input."""

    activation_bits: int | None
    observing: bool  # while a calibration runs: the range widens, and nothing is rounded

    def rounded_input(self, x: Tensor) -> Tensor:
        if self.activation_bits is None:
            return x
        limits = getattr(self, LIMITS)
        if not limits.isfinite().all():
            raise ValueError("no range of a convolution's input yet: train a step first")
        return RoundedInRange.apply(x, limits, self.activation_bits)


class AwareConv2d(InputInRange):
    """A convolution whose filters and input are rounded in each forward."""

    weight_bits: int
    group: None

    def forward(self, x: Tensor) -> Tensor:
        """A convolution whose weight and input are on grids, with gradients."""
        if self.activation_bits is not None and (self.observing or self.training):
            self._widen_range(x.detach())
        if self.observing:
            return super().forward(x)
        weight = RoundedWeight.apply(self.weight, self.weight_bits, None)
        return self._conv_forward(self.rounded_input(x), weight, self.bias)

    def _widen_range(self, x: Tensor) -> None:
        """Let the range of a convolution's input follow what comes in."""
        limits = getattr(self, LIMITS)
        low, high = x.aminmax()
        if not limits.isfinite().all():
            limits.copy_(torch.stack([low, high]))
        elif self.observing:
            limits.copy_(torch.stack([limits[0].minimum(low), limits[1].maximum(high)]))
        else:
            limits.lerp_(torch.stack([low, high]).to(limits.dtype), MOMENTUM)


class FixedConv2d(InputInRange):
    """A convolution whose filters are on their grids."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.rounded_input(x))


# --- from one to the other ------------------------------------------------------------------------

# What is mixed into a layer that trains, and what takes its place in a converted model.
FIXED = {AwareLinear: FixedLinear, AwareEmbedding: None, AwareConv2d: FixedConv2d}


def aware_class(layer: nn.Module) -> type:
    """Which of the classes above is to be mixed into a plain layer."""
    if isinstance(layer, nn.Linear):
        return AwareLinear
    if isinstance(layer, nn.Conv2d):
        return AwareConv2d
    return AwareEmbedding


@torch.no_grad()
def rounded_weight(layer: Any) -> Tensor:
    """The weight that an aware layer multiplies with, in its dtype."""
    weight = on_grid(layer.weight, bits=layer.weight_bits, group=layer.group)
    return weight.to(layer.weight.dtype)


# --- rounding that trains -------------------------------------------------------------------------


class Steps(NamedTuple):
    """In a layer on a grid: whole steps from the lowest level, before they are cut off."""

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


# --- rounding of activations ----------------------------------------------------------------------


def token_steps(x: Tensor, bits: int) -> Steps:
    """For aware layers: tokens of x [..., K], each on a grid between its ends."""
    x = x.detach().float()
    # In 16 bits a level of 8 bits would be missed by rounding: all of this is fp32.
    return _steps_from_lowest(x, x.amin(dim=-1, keepdim=True), x.amax(dim=-1, keepdim=True), bits)


def range_steps(x: Tensor, limits: Tensor, bits: int) -> Steps:
    """For aware convolutions: all of x on one grid, between the two `limits` [2]."""
    return _steps_from_lowest(x.detach().float(), limits[0], limits[1], bits)


def _steps_from_lowest(x: Tensor, low: Tensor, high: Tensor, bits: int) -> Steps:
    """In aware layers: x on a grid from `low` to `high`, of which zero is a level."""
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
        limits = limits.clone()  # that of this step: a later one moves it
        ctx.save_for_backward(x, limits)
        ctx.bits = bits
        return range_steps(x, limits, bits).rounded_(bits).to(x.dtype)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, limits = ctx.saved_tensors
        return gradient * range_steps(x, limits, ctx.bits).inside(ctx.bits), None, None


# --- rounding of weights --------------------------------------------------------------------------


class RoundedWeight(torch.autograd.Function):
    """A weight on its grid, in fp32. A weight that is cut off at the end gets no gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bits: int, group: int | None) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.grid = {"bits": bits, "group": group}
        return on_grid(weight, **ctx.grid).to(weight.dtype)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
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
        """The product of an aware layer; what backward needs is kept."""
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
        """An aware layer's gradients of tokens and weight, none where rounding has cut off."""
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
    """What a layer on grids reads: x [..., K], each token rounded; as it is without `bits`."""
    if bits is None:
        return x
    return token_steps(x, bits).rounded_(bits).to(x.dtype)
