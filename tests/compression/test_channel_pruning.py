"""Channels that are taken out of a MobileNet: the rest computes the same, and it is smaller."""

import copy

import pytest
import torch
from torch import nn
from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

from recipes_lib.architecture.mobile_net import initialise_, mobile_net
from recipes_lib.compression.channel_pruning import (
    apply_channel_pruning,
    channel_importance,
    choose_channels,
    inner_channels,
    plain_importance,
    plain_removal,
    predicted_parameters,
)
from recipes_lib.workflows.on_device.classify import multiply_adds
from tests.small_models import as_if_trained, small_model


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return as_if_trained(mobile_net(width=0.35, seed=0))


@pytest.fixture(scope="module")
def images():
    return torch.randn(6, 1, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def kept(network, images):
    return choose_channels(channel_importance(network, images), share=0.5, multiple_of=4)


@torch.no_grad()
def test_it_computes_what_the_others_leave(network, images, kept):
    """Catches channels that are made in one order and read in another, and statistics left over."""
    silent = copy.deepcopy(network)
    for name, part in inner_channels(silent).items():
        removed = torch.ones(part.channels, dtype=torch.bool)
        removed[kept[name]] = False
        part.reader.weight[:, removed] = 0
    pruned = apply_channel_pruning(copy.deepcopy(network), kept=kept)
    assert torch.allclose(pruned(images).logits, silent(images).logits, atol=1e-5)
    assert not torch.allclose(pruned(images).logits, network(images).logits, atol=1e-3)


def test_the_plain_removal_is_what_happens(network, kept):
    block = network.mobilenet_v2.layer[3]
    layers = [block.expand_1x1, block.conv_3x3, block.reduce_1x1]
    plain = plain_removal(*(layer.convolution for layer in layers), kept["block 3"])
    pruned = apply_channel_pruning(copy.deepcopy(network), kept=kept).mobilenet_v2.layer[3]
    for name, weight in zip(("expand_1x1", "conv_3x3", "reduce_1x1"), plain):
        assert torch.equal(getattr(pruned, name).convolution.weight, weight)


def test_importance_is_what_a_channel_adds(network, images):
    """Catches the importance of what goes into the norm, and that of another block."""
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


def test_parameters_and_work_fall_and_it_trains(network, images, kept):
    pruned = copy.deepcopy(network)
    predicted = predicted_parameters(pruned, kept=kept)
    apply_channel_pruning(pruned, kept=kept)
    assert sum(parameter.numel() for parameter in pruned.parameters()) == predicted
    before = multiply_adds(network, images[:1])
    assert 0.4 < multiply_adds(pruned, images[:1]) / before < 0.7
    assert all(len(channels) % 4 == 0 for channels in kept.values())
    loss = pruned.train()(images).logits.square().mean()
    loss.backward()
    assert all(parameter.grad is not None for parameter in pruned.parameters())


def test_it_can_be_pruned_again(network, images, kept):
    once = apply_channel_pruning(copy.deepcopy(network), kept=kept)
    again = choose_channels(channel_importance(once, images), share=0.25, multiple_of=2)
    apply_channel_pruning(once, kept=again)
    assert once(images).logits.isfinite().all()


@pytest.mark.parametrize(
    "settings",
    [
        {"first_layer_is_expansion": False, "tf_padding": False},
        {"expand_ratio": 3, "output_stride": 8, "finegrained_output": False},
    ],
)
@torch.no_grad()
def test_other_settings_of_the_family(settings, images):
    """Catches a stem whose channels another layer makes, and TensorFlow's rule for borders."""
    config = MobileNetV2Config(num_channels=1, depth_multiplier=0.35, image_size=32, **settings)
    network = as_if_trained(initialise_(MobileNetV2ForImageClassification(config)).eval())
    kept = choose_channels(channel_importance(network, images), share=0.5)
    silent = copy.deepcopy(network)
    for name, part in inner_channels(silent).items():
        removed = torch.ones(part.channels, dtype=torch.bool)
        removed[kept[name]] = False
        part.reader.weight[:, removed] = 0
    pruned = apply_channel_pruning(network, kept=kept)
    assert torch.allclose(pruned(images).logits, silent(images).logits, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_half_precision_and_frozen_layers(network, images, kept):
    half = copy.deepcopy(network).bfloat16()
    half.mobilenet_v2.conv_stem.requires_grad_(False)
    found = choose_channels(channel_importance(half, images), share=0.5, multiple_of=4)
    assert {name: len(channels) for name, channels in found.items()} == {
        name: len(channels) for name, channels in kept.items()
    }
    apply_channel_pruning(half, kept=found)
    assert half(images.bfloat16()).logits.isfinite().all()
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    frozen = half.mobilenet_v2.conv_stem.parameters()
    assert not any(parameter.requires_grad for parameter in frozen)


def test_masks_and_grids_come_after(network, kept):
    """Without the guard: half of the layers are cut, and the next one refuses its mask."""
    for technique in ("weight_norm", "spectral_norm"):
        masked = copy.deepcopy(network)
        getattr(nn.utils.parametrizations, technique)(
            masked.mobilenet_v2.layer[5].reduce_1x1.convolution
        )
        before = {name: value.shape for name, value in masked.state_dict().items()}
        with pytest.raises(ValueError, match=r"block 5 has a Parametrized.*before that"):
            apply_channel_pruning(masked, kept=kept)
        assert {name: value.shape for name, value in masked.state_dict().items()} == before


def test_bad_input(network, images, kept):
    before = copy.deepcopy(network.state_dict())
    for wrong, message in (
        ({"block 99": torch.tensor([0])}, "no part 'block 99'"),
        ({"block 3": torch.tensor([3, 1])}, "rising order"),
        ({"block 3": torch.tensor([True, False])}, "rising order"),
        ({"block 3": torch.tensor([0, 5000])}, "there are"),
        ({"block 3": "many"}, "give numbers of channels"),
    ):
        with pytest.raises(ValueError, match=message):
            apply_channel_pruning(network, kept={"stem": kept["stem"]} | wrong)
    with pytest.raises(ValueError, match="names no part"):
        apply_channel_pruning(network, kept={})
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    for share in (0, 1, 1.5):
        with pytest.raises(ValueError, match="share="):
            choose_channels({"x": torch.ones(8)}, share=share)
    with pytest.raises(ValueError, match=r"share=0\.01 takes less than multiple_of=8"):
        choose_channels({"x": torch.ones(16)}, share=0.01)
    with pytest.raises(ValueError, match="importance of x is not finite"):
        choose_channels({"x": torch.full((16,), torch.nan)}, share=0.5)
    with pytest.raises(ValueError, match="torch-pruning"):
        channel_importance(small_model("Llama"), images)
    with pytest.raises(ValueError, match="at least one image"):
        channel_importance(network, images[:0])
    with pytest.raises(ValueError, match="images are of type ndarray"):
        channel_importance(network, images.numpy())
    with pytest.raises(ValueError, match="not finite"):
        channel_importance(network, images * torch.inf)
    with pytest.raises(ValueError, match="the model reads"):
        channel_importance(network, torch.cat([images] * 2, dim=1))
    for nothing in (None, {}):
        with pytest.raises(ValueError, match="importance names no part"):
            choose_channels(nothing, share=0.5)
    pruned = apply_channel_pruning(copy.deepcopy(network), kept=kept)
    with pytest.raises(ValueError, match="could not load it"):
        pruned.save_pretrained("anywhere")


def test_images_of_another_kind(network, images):
    """Pixels up to 255 gave another order of the channels; more digits give the same one."""
    expected = channel_importance(network, images)["stem"]
    torch.testing.assert_close(channel_importance(network, images.double())["stem"], expected)
    for wrong, message in (
        (torch.ones(2, 1, 32, 32, dtype=torch.uint8), r"stored in torch\.uint8"),
        (torch.ones(2, 1, 48, 48), "32 x 32 pixels"),
        (torch.zeros(2, 1, 32, 32), "zero everywhere"),
    ):
        with pytest.raises(ValueError, match=message):
            channel_importance(network, wrong)


@pytest.mark.parametrize("values", [[1, 2], torch.ones(3, 3)])
def test_what_is_no_importance(values):
    with pytest.raises(ValueError, match=r"importance of stem is no tensor \[C\]"):
        choose_channels({"stem": values}, share=0.5)
