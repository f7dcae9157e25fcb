"""The idea equals transformers' layer; a fresh network lives; its mean has a kernel everywhere."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import EfficientNetConfig, EfficientNetForImageClassification
from transformers.models.efficientnet.modeling_efficientnet import EfficientNetSqueezeExciteLayer

from recipes_lib.architecture.efficient_net import (
    efficient_net,
    initialise_,
    plain_squeeze_excite,
    replace_pooler,
)
from recipes_lib.workflows.on_device.classify import image_logits

SMALL = {"num_channels": 1, "num_labels": 10, "width_coefficient": 0.25, "depth_coefficient": 0.3}


def small_of_transformers(**options):
    settings = SMALL | {"hidden_dim": 320, "image_size": 32} | options
    return EfficientNetForImageClassification(EfficientNetConfig(**settings)).eval()


def images(count=4, size=32):
    return torch.randn(count, 1, size, size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("size", [1, 5])
def test_channels_are_weighed_as_in_transformers(size):
    """The mistake: relu between the two layers, or a mean over the batch."""
    theirs = EfficientNetSqueezeExciteLayer(EfficientNetConfig(), 8, 48, expand=True)
    x = torch.randn(2, 48, size, size)
    torch.testing.assert_close(plain_squeeze_excite(x, theirs.reduce, theirs.expand), theirs(x))


def test_a_fresh_network_tells_images_apart_and_learns():
    """That of transformers does not: every comparison of two variants of it succeeds."""
    dead = small_of_transformers()
    assert image_logits(dead, images()).std(dim=0).max() < 1e-10
    toy = efficient_net(stages=2, seed=0)
    for model in (initialise_(dead), efficient_net(width=0.25, depth=0.5, seed=0), toy):
        spread = image_logits(model, images()).std(dim=0)
        assert (spread > 0.01).all() and (spread < 100).all()
        norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
        assert {norm.momentum for norm in norms} == {0.1}, "not 99 % of the last batch"
    F.cross_entropy(model.train()(images(8)).logits, torch.arange(8)).backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters())


@pytest.mark.parametrize("size", [32, 75])
def test_the_mean_is_the_same_without_a_window_beyond_the_map(size):
    """The mistake: another pooling that no backend takes, or one that computes something else."""
    model = initialise_(small_of_transformers(image_size=size))
    assert model.efficientnet.pooler.kernel_size == 320
    other = replace_pooler(copy.deepcopy(model))
    logits = [image_logits(each, images(size=size)) for each in (other, model)]
    torch.testing.assert_close(*logits)
    ours = efficient_net(width=0.25, depth=0.3)
    assert isinstance(ours.efficientnet.pooler, nn.AdaptiveAvgPool2d)
