"""A graph with fake quantization, calibrated."""

import pytest
import torch
from torch import nn

from recipes_lib.edge.export import export_to_executorch
from recipes_lib.edge.pt2e import plain_grid, quantize_pt2e
from recipes_lib.edge.runtime import load_pte


def tiny():
    """A convolution with its norm, and a layer that reads all of the image."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU6(), nn.Flatten()]
    net = nn.Sequential(*layers, nn.Linear(4 * 36, 3)).train()
    for _ in range(20):
        net(torch.randn(16, 1, 8, 8))
    return net.eval()


def images(number=64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(number, 1, 8, 8, generator=generator)


@pytest.fixture(scope="module")
def calibrated():
    return quantize_pt2e(tiny(), images())


def test_a_grid_by_hand():
    """A zero that is no level."""
    scale, zero = plain_grid(-1.0, 4.1)
    assert (scale, zero) == (pytest.approx(0.02), -78)
    assert plain_grid(1.0, 2.55)[1] == -128, "0 is a level, also where no number is 0"


def test_eight_bits_are_near(calibrated):
    """Nothing rounded, or another network; a graph of one batch size, or of training; the model.

    A weight is its levels of 8 bits times the scale of its channel.
    """
    net = tiny()
    x = images(9)
    expected = net(x)
    assert 0 < (calibrated(x) - expected).abs().max() < 0.02 * expected.abs().max()
    assert not calibrated.training
    torch.testing.assert_close(calibrated.eval()(x[:1]), calibrated(x)[:1], atol=0.03, rtol=0)
    assert not any(weight.requires_grad for weight in calibrated.parameters())
    whole, scale = calibrated.graph._frozen_param1, calibrated.graph._scale_1.view(-1, 1)
    assert (whole.dtype, whole.min(), whole.max()) == (torch.int8, -127, 127)
    torch.testing.assert_close(
        whole * scale, net[4].weight.detach(), atol=0.6 * scale.max(), rtol=0
    )


def test_the_file_computes_what_the_graph_computes(calibrated, tmp_path):
    """Within one level of the output; every rounding is with XNNPACK, a weight takes a byte."""
    x = images(1)
    exported = export_to_executorch(calibrated, (x,), path=tmp_path / "q.pte")
    assert exported.delegation.outside() == ()
    program = load_pte(exported.path)
    expected = calibrated(x)
    level = (calibrated(images()).max() - calibrated(images()).min()) / 255
    assert (program(x) - expected).abs().max() < 1.5 * level
    weights = 4 * 9 + 3 * 144 + 8 * (4 + 3)  # and a bias and a scale for each channel
    assert weights < exported.bytes < weights + 8_000
