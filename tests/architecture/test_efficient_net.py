"""Blocks equal transformers' blocks; arithmetic is what is counted; nets live; the mean is one."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import EfficientNetConfig, EfficientNetForImageClassification
from transformers.models.efficientnet.modeling_efficientnet import (
    EfficientNetBlock,
    EfficientNetSqueezeExciteLayer,
)

from recipes_lib.architecture.efficient_net import (
    PlainWeighedBlock,
    efficient_net,
    initialise_,
    plain_squeeze_excite,
    predicted_multiply_adds,
    predicted_parameters,
    replace_pooler,
)
from recipes_lib.workflows.on_device.classify import image_logits, multiply_adds

SMALL = {"num_channels": 1, "num_labels": 10, "width_coefficient": 0.25, "depth_coefficient": 0.3}


def small_of_transformers(**options):
    settings = SMALL | {"hidden_dim": 320} | options
    return EfficientNetForImageClassification(EfficientNetConfig(**settings)).eval()


def images(count=4, size=32, channels=1):
    return torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(0))


# --- the idea -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 5])
def test_channels_are_weighed_as_in_transformers(size):
    theirs = EfficientNetSqueezeExciteLayer(EfficientNetConfig(), 8, 48, expand=True)
    x = torch.randn(2, 48, size, size, requires_grad=True)
    y = plain_squeeze_excite(x, theirs.reduce, theirs.expand)
    expected = theirs(x)
    torch.testing.assert_close(y, expected)
    weights = torch.randn_like(y)
    inputs = [x, *theirs.parameters()]
    gradients = torch.autograd.grad((y * weights).sum(), inputs)
    torch.testing.assert_close(gradients, torch.autograd.grad((expected * weights).sum(), inputs))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("outputs", "size"), [(8, 7), (16, 6)])
def test_the_plain_block_is_that_of_transformers(outputs, size, training):
    theirs = EfficientNetBlock(
        EfficientNetConfig(),
        in_dim=8,
        out_dim=outputs,
        stride=1,
        expand_ratio=6,
        kernel_size=3,
        drop_rate=0.0,
        id_skip=outputs != 8,
        adjust_padding=True,
    )
    ours = PlainWeighedBlock(8, outputs)
    tensors = list(theirs.state_dict().values())
    ours.load_state_dict(dict(zip(ours.state_dict(), tensors, strict=True)))
    ours.train(training)
    theirs.train(training)
    x = torch.randn(3, 8, size, size)
    y = ours(x)
    expected = theirs(x)
    torch.testing.assert_close(y, expected)
    weights = torch.randn_like(y)
    gradients = torch.autograd.grad((y * weights).sum(), list(ours.parameters()))
    expected_gradients = torch.autograd.grad((expected * weights).sum(), list(theirs.parameters()))
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-3, atol=1e-4)


# --- the model ------------------------------------------------------------------------------------


def test_a_fresh_network_tells_images_apart():
    """That of transformers does not: every comparison of two variants of it succeeds."""
    dead = small_of_transformers(image_size=32)
    assert image_logits(dead, images()).std(dim=0).max() < 1e-10
    for model in (initialise_(dead), efficient_net(width=0.25, depth=0.3, seed=0)):
        spread = image_logits(model, images()).std(dim=0)
        assert (spread > 0.01).all() and (spread < 100).all()


def test_every_parameter_gets_a_gradient():
    model = efficient_net(width=0.25, depth=0.5, seed=0).train()
    F.cross_entropy(model(images(8)).logits, torch.arange(8)).backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters())


def test_running_statistics_follow_slowly():
    """transformers takes TensorFlow's number in the other sense: 99 % of the last batch."""
    theirs = small_of_transformers()
    assert theirs.efficientnet.encoder.top_bn.momentum == 0.99
    model = efficient_net(width=0.25, depth=0.3, seed=0)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert {norm.momentum for norm in norms} == {0.1}


def test_a_seed_decides_and_leaves_the_random_state():
    state = torch.get_rng_state()
    options = {"width": 0.25, "depth": 0.3}
    first, second, other = (efficient_net(seed=seed, **options) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.classifier.weight, second.classifier.weight)
    assert not torch.equal(first.classifier.weight, other.classifier.weight)
    assert not first.training


@pytest.mark.parametrize("size", [32, 75])
def test_the_mean_is_the_same_without_a_window_beyond_the_map(size):
    model = initialise_(small_of_transformers(image_size=size))
    assert isinstance(model.efficientnet.pooler, nn.AvgPool2d)  # no kernel of a device takes it
    assert model.efficientnet.pooler.kernel_size == 320
    other = replace_pooler(copy.deepcopy(model))
    assert isinstance(other.efficientnet.pooler, nn.AdaptiveAvgPool2d)
    torch.testing.assert_close(
        image_logits(other, images(size=size)), image_logits(model, images(size=size))
    )
    assert isinstance(
        efficient_net(width=0.25, depth=0.3).efficientnet.pooler, nn.AdaptiveAvgPool2d
    )


# --- the arithmetic -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"width": 0.5},
        {"width": 0.35, "depth": 0.5, "image_size": 33, "output_stride": 16},
        {"width": 0.25, "depth": 1.2, "image_size": 47, "channels": 3, "output_stride": 32},
        {"width": 1.1, "depth": 0.3, "image_size": 39, "classes": 1},
    ],
)
def test_predicted_is_what_is_counted(options):
    model = efficient_net(**options)
    size = options.get("image_size", 32)
    example = images(1, size, options.get("channels", 1))
    assert predicted_multiply_adds(model, image_size=size) == multiply_adds(model, example)
    assert predicted_parameters(model) == sum(p.numel() for p in model.parameters())


def test_predicted_where_some_blocks_have_equal_borders():
    model = small_of_transformers(depthwise_padding=[1, 2, 3])
    counted = multiply_adds(model, images(1, 53))
    assert predicted_multiply_adds(model, image_size=53) == counted
    assert counted != multiply_adds(small_of_transformers(), images(1, 53))


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 0}, "width=0: give a finite number above 0"),
        ({"depth": -1.0}, "depth=-1.0: give a finite number above 0"),
        ({"classes": 0}, "classes=0: give a whole number"),
        ({"output_stride": 4}, "output_stride=4: choose one of 8, 16, 32"),
        ({"image_size": 31}, "image_size=31: give a whole number of 32 or more"),
    ],
)
def test_wrong_numbers(options, message):
    with pytest.raises(ValueError, match=message):
        efficient_net(**options)


def test_another_model():
    for function in (initialise_, replace_pooler, predicted_parameters):
        with pytest.raises(ValueError, match="Linear is no EfficientNet of transformers: give one"):
            function(nn.Linear(3, 4))
    with pytest.raises(ValueError, match="pooling_type='max': only the mean"):
        replace_pooler(small_of_transformers(pooling_type="max"))
