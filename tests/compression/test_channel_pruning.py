"""Channels that are taken out of a MobileNet: the rest computes the same, and it is smaller."""

import copy

import pytest
import torch
from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

from recipes_lib.architecture.mobile_net import initialise_, mobile_net
from recipes_lib.compression.channel_pruning import (
    apply_channel_pruning,
    channel_importance,
    choose_channels,
    inner_channels,
    plain_importance,
    plain_removal,
)
from recipes_lib.workflows.on_device.classify import multiply_adds
from tests.small_models import as_if_trained, small_model

# A stem whose channels another layer makes, and TensorFlow's rule for borders.
OTHER_SETTINGS = {"first_layer_is_expansion": False, "tf_padding": False, "num_channels": 1}
OTHER_SETTINGS |= {"depth_multiplier": 0.35, "image_size": 32}


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return as_if_trained(mobile_net(width=0.35, seed=0))


@pytest.fixture(scope="module")
def images():
    return torch.randn(6, 1, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def kept(network, images):
    return choose_channels(channel_importance(network, images), share=0.5)


@torch.no_grad()
@pytest.mark.parametrize("ours", [True, False])
def test_it_computes_what_the_others_leave(network, images, ours):
    """The mistakes: channels made in one order and read in another, and statistics left over."""
    if not ours:
        torch.manual_seed(0)
        plain = MobileNetV2ForImageClassification(MobileNetV2Config(**OTHER_SETTINGS))
        network = as_if_trained(initialise_(plain).eval())
    kept = choose_channels(channel_importance(network, images), share=0.5)
    silent = copy.deepcopy(network)
    for name, part in inner_channels(silent).items():
        removed = torch.ones(part.channels, dtype=torch.bool)
        removed[kept[name]] = False
        part.reader.weight[:, removed] = 0
    pruned = apply_channel_pruning(copy.deepcopy(network), kept=kept)
    assert torch.allclose(pruned(images).logits, silent(images).logits, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(pruned(images).logits, network(images).logits, atol=1e-2)


def test_the_plain_removal_is_what_happens(network, kept):
    """The mistake: the plain lines take other channels."""
    block = network.mobilenet_v2.layer[3]
    layers = [block.expand_1x1, block.conv_3x3, block.reduce_1x1]
    plain = plain_removal(*(layer.convolution for layer in layers), kept["block 3"])
    pruned = apply_channel_pruning(copy.deepcopy(network), kept=kept).mobilenet_v2.layer[3]
    for name, weight in zip(("expand_1x1", "conv_3x3", "reduce_1x1"), plain):
        assert torch.equal(getattr(pruned, name).convolution.weight, weight)


def test_importance_is_what_a_channel_adds(network, images):
    """The mistake: the importance of what goes into the norm, or that of another block."""
    block = network.mobilenet_v2.layer[3]
    caught = {}
    hook = block.conv_3x3.register_forward_hook(lambda _m, _i, out: caught.update(inside=out))
    with torch.no_grad():
        network(images)
    hook.remove()
    weight = block.reduce_1x1.convolution.weight[:, :, 0, 0]
    expected = plain_importance(caught["inside"], weight)
    found = channel_importance(network.train(), images)
    assert network.training, "a measurement leaves the mode alone"
    network.eval()
    assert torch.allclose(found["block 3"], expected, rtol=1e-4)
    with pytest.raises(ValueError, match=r"stored in torch\.uint8"):
        channel_importance(network, torch.ones(2, 1, 32, 32, dtype=torch.uint8))


def test_work_falls_and_it_trains_and_is_pruned_again(network, images, kept):
    """The mistake: a second pruning reads widths of the configuration."""
    pruned = apply_channel_pruning(copy.deepcopy(network), kept=kept)
    before = multiply_adds(network, images[:1])
    assert 0.4 < multiply_adds(pruned, images[:1]) / before < 0.7
    assert all(len(channels) % 4 == 0 for channels in kept.values())
    pruned.train()(images).logits.square().mean().backward()
    assert all(parameter.grad is not None for parameter in pruned.parameters())
    again = choose_channels(channel_importance(pruned, images), share=0.25)
    assert apply_channel_pruning(pruned, kept=again)(images).logits.isfinite().all()
    with pytest.raises(ValueError, match="could not load it"):
        pruned.save_pretrained("anywhere")


def test_refuses_what_is_not_there(images):
    """The mistakes: nothing goes, or another kind of network."""
    with pytest.raises(ValueError, match=r"share=0\.01 takes less than 8"):
        choose_channels({"x": torch.ones(16)}, share=0.01)
    with pytest.raises(ValueError, match="torch-pruning"):
        channel_importance(small_model("Llama"), images)
