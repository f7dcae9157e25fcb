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


def test_images_as_whole_numbers_are_refused(network):
    """The mistake: numbers from 0 to 255, of which the network has seen none."""
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
