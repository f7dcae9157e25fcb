"""What networks of convolutions have in common: rounded channels and first weights.

A model that transformers makes from a configuration alone is dead: its first weights are so small
that all logits are equal. `initialise_convolutions_` sets this right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
FIRST_FACTOR_OF_BRANCHES = 0.1
MOMENTUM = 0.1
BATCH_OF_NOISE = 64


def rounded_channels(channels: float, *, divisor: int = 8, least: int | None = None) -> int:
    """Channels of a convolution: the multiple of `divisor` next to `channels`, at most 10 % below.

    Machines compute whole vectors of channels. `least` is the smallest answer; None: `divisor`.
    """
    if least is None:
        least = divisor
    rounded = max(least, int(channels + divisor / 2) // divisor * divisor)
    if rounded < 0.9 * channels:
        rounded += divisor
    return rounded


def seeded(make: Callable[[], Any], seed: int | None) -> Any:
    """The network that `make()` returns with this seed. None: with the current random state."""
    with torch.random.fork_rng(enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        return make()


@torch.no_grad()
def initialise_convolutions_(model: Any, *, branches: Iterable[nn.Module]) -> None:
    """First weights with which signals keep their size from layer to layer, in place.

    A convolution gets weights of variance 2 over the number of inputs of one output (He et al.,
    arXiv 1502.01852). Normalization starts with factors of one, and its running mean and variance
    move by a tenth of the way to those of a batch. They begin as those of images of random pixels:
    with zeros and ones, signals of an untrained network fade from block to block in eval mode, and
    all its logits are nearly equal.

    Args:
        branches: the last norm of each block whose output is added to its input. It starts with
            factors of 0.1, so that a deep network begins as one of a few layers and learns in
            fewer steps (Goyal et al., arXiv 1706.02677, who begin with 0).
    """
    norms = [module for module in model.modules() if isinstance(module, NORMS)]
    for module in model.modules():
        if isinstance(module, CONVOLUTIONS):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            module.reset_parameters()
    for norm in norms:
        norm.reset_parameters()
        norm.momentum = 1.0  # takes the statistics of the next batch as they are
    for norm in branches:
        nn.init.constant_(norm.weight, FIRST_FACTOR_OF_BRANCHES)
    was_training = model.training
    model.train()
    model(_noisy_images_for(model))
    model.train(was_training)
    for norm in norms:
        norm.momentum = MOMENTUM


def _noisy_images_for(model: Any) -> Tensor:
    side = model.config.image_size
    weight = next(model.parameters())
    shape = (BATCH_OF_NOISE, model.config.num_channels, side, side)
    return torch.randn(shape, device=weight.device, dtype=weight.dtype)
