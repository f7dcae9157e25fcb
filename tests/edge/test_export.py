"""One convolutional net as a .pte, from all sides."""

import pytest
import torch
from torch import nn

from recipes_lib.edge.export import (
    export_to_executorch,
)
from recipes_lib.edge.runtime import load_pte
from tests.edge.conftest import SHAPE


class PoolsOverEverything(nn.Module):
    """As transformers' EfficientNet: an average pooling with `ceil_mode`, wider than the image."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3)
        self.pooler = nn.AvgPool2d(32, ceil_mode=True)

    def forward(self, x):
        return self.pooler(self.convolution(x)).flatten(1)


def test_the_file_computes_what_the_model_computes(net, exported):
    """Norms that are folded wrongly, or that use the numbers of the example."""
    program = load_pte(exported.path)
    for _ in range(3):
        x = torch.randn(SHAPE)
        torch.testing.assert_close(program(x), net(x), atol=1e-5, rtol=1e-5)


def test_everything_is_delegated(exported):
    """What stays outside costs time and no accuracy."""
    delegation = exported.delegation
    assert delegation.share == 1
    assert delegation.row("convolution").inside == 4
    assert delegation.row("linear").inside == 1


def test_the_file_holds_the_weights_once(net, exported):
    """A second copy of the weights, or norms that are not folded; and nothing is left beside it."""
    weights = sum(parameter.numel() for name, parameter in net.named_parameters())
    norms = 2 * (8 + 32 + 32 + 8)
    weights += -norms + norms // 2  # of a norm's four numbers per channel one is left, as a bias
    assert 4 * weights < exported.bytes < 4 * weights + 12_000
    assert list(exported.path.parent.iterdir()) == [exported.path]


def test_without_a_backend(net, tmp_path, capfd):
    """Equal numbers, nothing delegated; and not a line of the libraries reaches the terminal."""
    path = tmp_path / "deep" / "portable.pte"
    x = torch.randn(SHAPE)
    net.train()
    plain = export_to_executorch(net, (x,), path=path, delegate=False)
    assert net.training
    assert plain.delegation.share == 0
    torch.testing.assert_close(load_pte(path)(x), net.eval()(x), atol=1e-5, rtol=1e-5)
    assert capfd.readouterr() == ("", "")


def test_a_pooling_that_stays_outside(tmp_path):
    """XNNPACK does not take it, and the portable kernel made an EfficientNet fifty times slower."""
    path = tmp_path / "m.pte"
    x = torch.randn(SHAPE)
    with pytest.raises(ValueError, match=r"1 × avg_pool2d.*AdaptiveAvgPool2d"):
        export_to_executorch(PoolsOverEverything(), (x,), path=path)
    assert list(tmp_path.iterdir()) == []
