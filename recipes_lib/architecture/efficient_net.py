"""EfficientNet: inverted residuals that weigh their channels, scaled in width, depth and pixels.

Problem    A block of MobileNet treats each image alike: a channel that tells nothing about this one
           counts as much as all others. And a network that is to become better can grow in three
           ways: more channels, more blocks, or larger images. Each alone stops helping soon.
Idea       Squeeze and excite: the mean of each channel says what the image shows, and two small
           layers make a factor from 0 to 1 for each channel of it:

               x * sigmoid(A silu(B mean(x)))          B [S, C], A [C, S], S about C / 24

           And scaling in proportion: for one step, depth grows by 1.2, width by 1.1 and pixels by
           1.15, which doubles the work, as 1.2 x 1.1² x 1.15² is about 2.
Saves      Work at equal accuracy. The layers that make the factors work on one pixel: hardly any
           multiply-adds, but 2 C S parameters in each block.
Costs      Each factor needs the mean of the whole map first, and silu takes an exponential where
           relu6 takes two comparisons: a multiply-add costs more time than in MobileNet.
Use when   Accuracy comes first on a device that has time; as a teacher of a smaller network.
Not when   Milliseconds come first: see MobileNet. Accelerators for whole numbers that know neither
           sigmoid nor silu: take an EfficientNet-Lite, which has relu6 and no factors.
In production   transformers `EfficientNetForImageClassification.from_pretrained(…)`, timm
           `efficientnet_b0` and `tf_efficientnet_lite0`, torchvision `efficientnet_b0`.
Source     Tan and Le, "EfficientNet", arXiv 1905.11946; Hu et al., "Squeeze-and-Excitation
           Networks", arXiv 1709.01507.

Two things in transformers are traps. First weights: normalization begins with factors around 0, so
that all logits are equal. And the mean over the last map is an average pooling whose window is as
large as the number of channels, which no kernel of a device's runtime takes. `efficient_net`,
`initialise_` and `replace_pooler` set this right.

Shapes: B images, C channels, S squeezed channels, H and W pixels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes_lib.architecture._convolutions import (
    initialise_convolutions_,
    rounded_channels,
    seeded,
)

LAST = 1280  # channels of the last convolution, at width 1
# Of the seven stages. The first convolution has a stride of 2, too: an image of 32 pixels ends as
# one of 4, where that of B0 ends as a single pixel.
STRIDES = (1, 2, 2, 1, 1, 1, 1)

# --- the idea: what a learner can copy ------------------------------------------------------------


def plain_squeeze_excite(x: Tensor, reduce: nn.Conv2d, expand: nn.Conv2d) -> Tensor:
    """x [B, C, H, W], each channel times a factor that the means of all channels decide."""
    means = x.mean(dim=(2, 3), keepdim=True)  # [B, C, 1, 1]
    squeezed = F.silu(reduce(means))  # [B, S, 1, 1]
    factors = torch.sigmoid(expand(squeezed))  # [B, C, 1, 1]
    return x * factors


# --- the technique --------------------------------------------------------------------------------


def efficient_net(
    *,
    width: float = 0.5,
    depth: float = 1.0,
    stages: int = 7,
    classes: int = 10,
    image_size: int = 32,
    channels: int = 1,
    seed: int | None = None,
) -> Any:
    """An `EfficientNetForImageClassification` with first weights that can be trained, in eval mode.

    With width 1 and depth 1 it is EfficientNet-B0, but for two strides, and for the dropout, which
    is 0.2 at the end and none inside.

    Args:
        width: multiplies all channels; they are rounded to multiples of 8.
        depth: multiplies the number of blocks of each stage, rounded up.
        stages: how many of the seven there are; with few of them it is a toy for a test.
        image_size: pixels of a side, 32 or more.
        channels: of an image, 1 for grey and 3 for colours.
        seed: of the first weights. None: the current random state.
    """
    from transformers import EfficientNetConfig, EfficientNetForImageClassification

    config = EfficientNetConfig(
        num_channels=channels,
        image_size=image_size,
        width_coefficient=width,
        depth_coefficient=depth,
        strides=STRIDES,
        hidden_dim=rounded_channels(LAST * width),  # any other number does not fit the last norm
        num_labels=classes,
        dropout_rate=0.2,
        drop_connect_rate=0.0,
    )
    config.in_channels = config.in_channels[:stages]  # transformers makes one stage for each
    model = seeded(lambda: initialise_(EfficientNetForImageClassification(config)), seed)
    return replace_pooler(model).eval()


def initialise_(model: Any) -> Any:
    """First weights for an EfficientNet of transformers, in place; returns `model`."""
    branches = []
    for block in model.efficientnet.encoder.blocks:
        if block.projection.apply_dropout:  # what transformers calls a block with a residual
            branches.append(block.projection.project_bn)
    initialise_convolutions_(model, branches=branches)
    return model


def replace_pooler(model: Any) -> Any:
    """EfficientNet's mean over the last map becomes `AdaptiveAvgPool2d(1)`, in place.

    The output is the same for maps up to 1,280 pixels wide, which is any image. transformers takes
    the mean by a window of [D, D] pixels for D channels that reaches beyond the map: runtimes of
    devices have no kernel for it, so it runs by a slow general one.
    """
    model.efficientnet.pooler = nn.AdaptiveAvgPool2d(1)
    return model
