"""The layers of a model that trains on a grid, and of one whose weights are on it for good.

Part of quantization_aware. Each is mixed into a layer, which keeps its name and its parameters:

    class      the weight of the layer             what its forward multiplies with
    Aware...   in full precision, and it trains    that weight, rounded in each forward
    Fixed...   rounded already, and frozen         that weight

Both round what they read, in the same way. So a converted layer gives the same numbers. A converted
embedding is a plain one: it reads rows of a table that is rounded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from recipes_lib.core.model.integer_grid import on_grid
from recipes_lib.precision.quantization_aware.rounding import (
    RoundedInRange,
    RoundedLinear,
    RoundedWeight,
    rounded_tokens,
)

LIMITS = "activation_limits"  # the buffer of a convolution: its smallest and largest input
MOMENTUM = 0.05  # how far a step moves these limits towards its own

# --- linear layers --------------------------------------------------------------------------------


class AwareLinear:
    """A linear layer whose weight and tokens are rounded in each forward."""

    weight_bits: int
    group: int | None  # None: the whole row has one scale
    activation_bits: int | None

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        y = RoundedLinear.apply(x, self.weight, self.weight_bits, self.group, self.activation_bits)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return y


class FixedLinear:
    """A linear layer whose weight is on its grid, and whose tokens are rounded as they come."""

    activation_bits: int | None

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        return super().forward(rounded_tokens(x, self.activation_bits))


# --- embeddings -----------------------------------------------------------------------------------


class AwareEmbedding:
    """An embedding whose rows are rounded as they are read: each has a scale of its own."""

    weight_bits: int
    group: None

    def forward(self, ids: Tensor) -> Tensor:
        """[B, S] -> [B, S, D]."""
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
    """What both kinds of convolution have: one grid for all of their input.

    It is that of a range which training finds, as a runtime has a fixed one.
    """

    activation_bits: int | None
    observing: bool  # while a calibration runs: the range widens, and nothing is rounded

    def rounded_input(self, x: Tensor) -> Tensor:
        """x on its grid; as it is, where it has none."""
        if self.activation_bits is None:
            return x
        limits = getattr(self, LIMITS)
        if not limits.isfinite().all():
            raise ValueError(
                "a convolution has no range of its input yet: train a step first, or give "
                "calibration=images to apply_quantization_aware"
            )
        return RoundedInRange.apply(x, limits, self.activation_bits)


class AwareConv2d(InputInRange):
    """A convolution whose filters and input are rounded in each forward.

    A filter has one scale. In training mode the range of the input follows what comes.
    """

    weight_bits: int
    group: None

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, O, H', W']."""
        if self.activation_bits is not None and (self.observing or self.training):
            self._move_limits(x.detach())
        if self.observing:
            return super().forward(x)
        weight = RoundedWeight.apply(self.weight, self.weight_bits, None)
        return self._conv_forward(self.rounded_input(x), weight, self.bias)

    def _move_limits(self, x: Tensor) -> None:
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
        """[B, C, H, W] -> [B, O, H', W']."""
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
    assert isinstance(layer, nn.Embedding), "other layers are not asked for"
    return AwareEmbedding


@torch.no_grad()
def rounded_weight(layer: Any) -> Tensor:
    """The weight that an aware layer multiplies with, in its dtype."""
    weight = on_grid(layer.weight, bits=layer.weight_bits, group=layer.group)
    return weight.to(layer.weight.dtype)
