"""What networks of convolutions have in common: first weights, rounded channels, predicted work."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recipes_lib.core.checks import check_number

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
FIRST_FACTOR_OF_BRANCHES = 0.1


@dataclass(frozen=True)
class Work:
    """What layers cost: parameters, and multiply-adds for one image."""

    parameters: int = 0
    multiply_adds: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.parameters + other.parameters, self.multiply_adds + other.multiply_adds)


def convolution_work(
    *, inputs: int, outputs: int, kernel: int, pixels: int, groups: int = 1, norm: bool = True
) -> Work:
    """The work of a convolution that makes `outputs` channels of `pixels` pixels each.

    Every pixel of an output is a sum over the inputs of its group and the kernel's places. With
    `norm`, two parameters for each output follow; without, a bias.
    """
    weights = outputs * inputs // groups * kernel**2
    after = outputs
    if norm:
        after = 2 * outputs
    return Work(weights + after, weights * pixels)


def linear_work(*, inputs: int, outputs: int) -> Work:
    """The work of a linear layer with a bias, for one row."""
    return Work((inputs + 1) * outputs, inputs * outputs)


def rounded_channels(channels: float, *, divisor: int = 8, least: int | None = None) -> int:
    """The multiple of `divisor` that is next to `channels`, and never less by more than 10 %.

    Machines compute whole vectors of channels. `least` is the smallest answer; None: `divisor`.
    """
    if least is None:
        least = divisor
    rounded = max(least, int(channels + divisor / 2) // divisor * divisor)
    if rounded < 0.9 * channels:
        rounded += divisor
    return rounded


@torch.no_grad()
def initialise_convolutions_(
    model: nn.Module,
    *,
    noise: Tensor,
    branches: Iterable[nn.Module] = (),
    momentum: float = 0.1,
) -> None:
    """First weights with which signals keep their size from layer to layer, in place.

    A convolution gets weights of variance 2 over the number of inputs of one output (He et al.,
    arXiv 1502.01852). Normalization starts with factors of one, and its running mean and variance
    move by `momentum` of the way to those of a batch.

    Args:
        noise: images [B, C, H, W] without a meaning. The running statistics begin as those of this
            batch: with zeros and ones, signals of an untrained network fade from block to block in
            eval mode, and all its logits are nearly equal.
        branches: the last norm of each block whose output is added to its input. It starts with
            factors of 0.1, so that a deep network begins as one of a few layers and learns in
            fewer steps (Goyal et al., arXiv 1706.02677, who begin with 0).
    Raises ValueError for a momentum that is not above 0 and below 1.
    """
    check_number(above=0, below=1, momentum=momentum)
    for module in model.modules():
        if isinstance(module, CONVOLUTIONS):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, NORMS):
            module.reset_parameters()
            module.momentum = 1.0  # takes the statistics of the next batch as they are
        elif isinstance(module, nn.Linear):
            module.reset_parameters()
    for norm in branches:
        nn.init.constant_(norm.weight, FIRST_FACTOR_OF_BRANCHES)
    was_training = model.training
    model.train()
    model(noise)
    model.train(was_training)
    for module in model.modules():
        if isinstance(module, NORMS):
            module.momentum = momentum


def noise_for(model: Any, *, batch: int = 64) -> Tensor:
    """Images [B, C, H, W] of random pixels, as large as the configuration of `model` says."""
    size = model.config.image_size
    if isinstance(size, int):
        size = (size, size)
    weight = next(model.parameters())
    shape = (batch, model.config.num_channels, *size)
    return torch.randn(shape, device=weight.device, dtype=weight.dtype)
