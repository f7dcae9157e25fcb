"""Libraries beside ours: the same network, chosen by somebody else."""

import copy

import pytest
import torch

from recipes_lib.architecture.mobile_net import mobile_net
from recipes_lib.compression.channel_pruning import (
    apply_channel_pruning,
    channel_importance,
    choose_channels,
    inner_channels,
)
from recipes_lib.workflows.on_device.pruning_library import pruned_by_torch_pruning


def test_torch_pruning_takes_as_many_channels():
    """Catches channels between blocks that go as well, and 7 of 8 that stay after rounding."""
    pytest.importorskip("torch_pruning")
    network = mobile_net(width=0.35, seed=0)
    images = torch.randn(2, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    kept = choose_channels(channel_importance(network, images), share=0.6)
    ours = apply_channel_pruning(copy.deepcopy(network), kept=kept)
    theirs = pruned_by_torch_pruning(network, images[:1], kept=kept)
    shapes = {name: parameter.shape for name, parameter in ours.named_parameters()}
    assert {name: parameter.shape for name, parameter in theirs.named_parameters()} == shapes
    assert theirs(images).logits.isfinite().all()
    assert inner_channels(network)["block 3"].channels > len(kept["block 3"]), "a copy was cut"
