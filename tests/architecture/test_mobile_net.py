"""Arithmetic is what is counted; nets live."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

from recipes_lib.architecture._convolutions import rounded_channels
from recipes_lib.architecture.mobile_net import (
    initialise_,
    mobile_net,
    predicted_multiply_adds,
    predicted_parameters,
)
from recipes_lib.workflows.on_device.classify import image_logits, multiply_adds


def parameters_of(model):
    return sum(parameter.numel() for parameter in model.parameters())


def images(count=4, size=32, channels=1):
    return torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(0))


# --- the model ------------------------------------------------------------------------------------


def test_a_fresh_network_tells_images_apart_and_learns():
    """That of transformers does not: every comparison of two variants of it succeeds."""
    config = MobileNetV2Config(num_channels=1, num_labels=10, depth_multiplier=0.5)
    dead = MobileNetV2ForImageClassification(config).eval()
    assert image_logits(dead, images()).std(dim=0).max() < 1e-10
    config.image_size = 32
    for model in (initialise_(dead), mobile_net(seed=0)):
        spread = image_logits(model, images()).std(dim=0)
        assert (spread > 0.01).all() and (spread < 100).all()
    F.cross_entropy(model.train()(images(8)).logits, torch.arange(8)).backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters())


def test_running_statistics_follow_slowly_and_few_features_are_dropped():
    """transformers takes TensorFlow's numbers in the other sense: 99.7 % of the last batch is
    taken as the statistics, and 80 % of the features are dropped."""
    theirs = MobileNetV2ForImageClassification(MobileNetV2Config())
    assert theirs.dropout.p == 0.8
    assert theirs.mobilenet_v2.conv_1x1.normalization.momentum == 0.997
    ours = mobile_net(seed=0)
    assert ours.dropout.p == 0.2
    norms = [module for module in ours.modules() if isinstance(module, nn.BatchNorm2d)]
    assert {norm.momentum for norm in norms} == {0.1}
    before = norms[0].running_mean.clone()
    ours.train()(images(8) + 5)
    moved = (norms[0].running_mean - before).abs().max()
    ours(images(8) + 5)
    assert moved > 0 and (norms[0].running_mean - before).abs().max() > 1.5 * moved


# --- the arithmetic -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"width": 0.1, "image_size": 31, "channels": 3}, {"blocks": 2}]
)
def test_predicted_is_what_is_counted(options):
    model = mobile_net(**options)
    size = options.get("image_size", 32)
    example = images(1, size, options.get("channels", 1))
    assert predicted_multiply_adds(model, image_size=size) == multiply_adds(model, example)
    assert predicted_parameters(model) == parameters_of(model)


def test_channels_are_rounded_and_never_much_fewer():
    """The mistake: 67 channels become 64, and 11 become 8, which is a quarter less."""
    rounded = [rounded_channels(number) for number in (1, 11, 16, 67, 100)]
    assert rounded == [8, 16, 16, 64, 104]
    assert rounded_channels(3, divisor=2, least=4) == 4
