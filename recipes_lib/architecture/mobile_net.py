"""MobileNet: convolutions in two steps, one over places and one over channels.

Problem    A convolution of 3 x 3 multiplies each pixel of each output channel with 9 pixels of
           every input channel. On a phone, these products are the time of a network for images.
Idea       One filter per channel looks at places only, and a 1 x 1 convolution mixes channels only:

               usual        K x C x 9 products for a pixel
               separable    C x 9 + K x C                            about 8 or 9 times fewer

           MobileNetV2 makes a block of it that is wide inside and narrow outside:

               x [C] -> 1 x 1 -> [6C] -> 3 x 3, each alone -> [6C] -> 1 x 1 -> [C] -> + x

           The filters work where there are many channels, and what a later block reads is small.
Saves      Multiply-adds and parameters by 8 to 9 in each pair of layers, at 3 x 3.
Costs      Three layers in place of one, and activations of 6C channels. A depthwise filter does
           little work for each byte that it reads, so time falls less than multiply-adds do. For
           one small image in eager PyTorch the time is that of starting operators: a narrower net
           has as many of them. It takes a compiled or exported model to see the gain.
Use when   Images on a phone, in a browser, or on a small board; `width` scales all channels, and
           with it work and parameters, by about its square.
Not when   A large GPU runs large batches: usual convolutions use its units better. Very small
           images: a network that halves them five times has one pixel left of 32.
In production   transformers `MobileNetV2ForImageClassification`, timm `mobilenetv2_050` and
           `mobilenetv4_conv_small`, torchvision `mobilenet_v2`. All three begin with trained
           weights (`from_pretrained`, `weights=`), which is better than to train from the start.
Source     Howard et al., "MobileNets", arXiv 1704.04861; Sandler et al., "MobileNetV2: Inverted
           Residuals and Linear Bottlenecks", arXiv 1801.04381.

Shapes: B images, C input channels, K output channels, H and W pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from recipes_lib.architecture._convolutions import (
    initialise_convolutions_,
    rounded_channels,
    seeded,
)

# Channels and strides of the blocks after the first, at width 1 (table 2 of the paper).
CHANNELS = (16, 24, 24, 32, 32, 32, 64, 64, 64, 64, 96, 96, 96, 160, 160, 160, 320)
STRIDES = (2, 1, 2, 1, 1, 2, 1, 1, 1, 1, 1, 1, 2, 1, 1, 1)
FIRST = 32  # channels of the first convolution
LAST = 1280  # channels of the last one

# --- the idea: what a learner can copy ------------------------------------------------------------


def plain_depthwise_separable(x: Tensor, filters: Tensor, mixing: Tensor) -> Tensor:
    """x [B, C, H, W], one of filters [C, 3, 3] for each channel, then mixing [K, C]."""
    height, width = x.shape[-2:]
    padded = F.pad(x, (1, 1, 1, 1))
    places = torch.zeros_like(x)
    for row in range(3):
        for column in range(3):
            moved = padded[:, :, row : row + height, column : column + width]
            places = places + filters[:, row, column, None, None] * moved
    return torch.einsum("kc,bchw->bkhw", mixing, places)


# --- the technique --------------------------------------------------------------------------------


def mobile_net(
    *,
    width: float = 0.5,
    classes: int = 10,
    image_size: int = 32,
    channels: int = 1,
    blocks: int = len(STRIDES),
    seed: int | None = None,
) -> Any:
    """A `MobileNetV2ForImageClassification` with first weights that can be trained, in eval mode.

    Three settings differ from transformers' own: borders are a part of the convolutions, where
    TensorFlow's rule takes an operator of its own before each; the last convolution becomes
    narrower with `width`, which has most of a small model's parameters; and dropout is 0.2, where
    transformers drops 80 % of the features (in TensorFlow, 0.8 was the part that is kept).

    Args:
        width: multiplies all channels; they are rounded to multiples of 8, and 8 is the least.
        image_size: pixels of a side. It changes no weight: it is what the configuration says.
        channels: of an image, 1 for grey and 3 for colours.
        blocks: how many of the 16 behind the stem there are; with few of them it is a toy for a
            test.
        seed: of the first weights. None: the current random state.
    """
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    config = MobileNetV2Config(
        num_channels=channels,
        image_size=image_size,
        depth_multiplier=width,
        num_labels=classes,
        finegrained_output=False,
        tf_padding=False,
        classifier_dropout_prob=0.2,
        blocks=blocks,
    )

    def make() -> Any:
        model = MobileNetV2ForImageClassification(config)
        if blocks < len(STRIDES):
            _keep_first(model, blocks)
        return initialise_(model)

    return seeded(make, seed).eval()


def _keep_first(model: Any, blocks: int) -> None:
    """The first blocks of a MobileNet alone, and a last convolution that takes their channels."""
    trunk = model.mobilenet_v2
    del trunk.layer[blocks:]
    last = trunk.conv_1x1
    trunk.conv_1x1 = type(last)(
        model.config,
        in_channels=trunk.layer[-1].reduce_1x1.convolution.out_channels,
        out_channels=last.convolution.out_channels,
        kernel_size=1,
    )


def initialise_(model: Any) -> Any:
    """First weights for a MobileNetV2 of transformers, in place; returns `model`."""
    branches = []
    for block in model.mobilenet_v2.layer:
        if block.use_residual:
            branches.append(block.reduce_1x1.normalization)
    initialise_convolutions_(model, branches=branches)
    return model


# --- the arithmetic -------------------------------------------------------------------------------


class Work(NamedTuple):
    """What layers cost: parameters, and multiply-adds for one image."""

    parameters: int
    multiply_adds: int


def predicted_parameters(model: Any) -> int:
    """Parameters of a MobileNetV2 classifier as its configuration describes it, before pruning."""
    return sum(layer.parameters for layer in _mobile_net_work(model.config, image_size=32))


def predicted_multiply_adds(model: Any, *, image_size: int) -> int:
    """Multiply-adds of a MobileNetV2 and its linear layer for an image of `image_size` pixels."""
    return sum(
        layer.multiply_adds for layer in _mobile_net_work(model.config, image_size=image_size)
    )


def _convolution(inputs: int, outputs: int, *, kernel: int = 1, side: int, groups: int = 1) -> Work:
    """The work of a convolution of MobileNet: each output sums over the inputs of its group."""
    weights = outputs * inputs // groups * kernel**2
    return Work(weights + 2 * outputs, weights * side**2)


def _mobile_net_work(config: Any, *, image_size: int) -> Iterator[Work]:
    """The work of each layer of a MobileNetV2, from the image to the classes."""
    side = _halved(image_size)
    first = _scaled(config, FIRST)
    yield _convolution(config.num_channels, first, kernel=3, side=side)
    if not config.first_layer_is_expansion:
        yield _convolution(first, first, side=side)
    yield _convolution(first, first, kernel=3, side=side, groups=first)
    yield _convolution(first, _scaled(config, CHANNELS[0]), side=side)
    for inputs, outputs, stride in _blocks_of_mobile_net(config):
        wide = rounded_channels(
            round(inputs * config.expand_ratio),
            divisor=config.depth_divisible_by,
            least=config.min_depth,
        )
        yield _convolution(inputs, wide, side=side)
        if stride == 2:
            side = _halved(side)
        yield _convolution(wide, wide, kernel=3, side=side, groups=wide)
        yield _convolution(wide, outputs, side=side)
    last = LAST
    if not config.finegrained_output or config.depth_multiplier >= 1:
        last = _scaled(config, LAST)
    yield _convolution(_scaled(config, CHANNELS[_block_count(config)]), last, side=side)
    yield Work((last + 1) * config.num_labels, last * config.num_labels)  # with a bias


def _blocks_of_mobile_net(config: Any) -> Iterator[tuple[int, int, int]]:
    for index, stride in enumerate(STRIDES[: _block_count(config)]):
        yield _scaled(config, CHANNELS[index]), _scaled(config, CHANNELS[index + 1]), stride


def _block_count(config: Any) -> int:
    """How many blocks a MobileNet has: a configuration of transformers does not say it."""
    return getattr(config, "blocks", len(STRIDES))


def _scaled(config: Any, channels: int) -> int:
    return rounded_channels(
        round(channels * config.depth_multiplier),
        divisor=config.depth_divisible_by,
        least=config.min_depth,
    )


def _halved(side: int) -> int:
    """Pixels of a side after a stride of 2, whatever the rule for borders."""
    return (side + 1) // 2
