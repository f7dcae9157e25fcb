import pytest
import torch
from torch import nn

from recipes_lib.edge._exported_file import require_delegated
from recipes_lib.edge.export import (
    PlainRecorder,
    export_to_executorch,
    plain_replay,
    predicted_pte_bytes,
)
from recipes_lib.edge.runtime import load_pte

SHAPE = (1, 1, 16, 16)


class PoolsOverEverything(nn.Module):
    """As transformers' EfficientNet: an average pooling with `ceil_mode`, wider than the image."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3)
        self.pooler = nn.AvgPool2d(32, ceil_mode=True)

    def forward(self, x):
        return self.pooler(self.convolution(x)).flatten(1)


class Unknown(nn.Module):
    def forward(self, x):
        return torch.linalg.svdvals(x)


class NoKernel(nn.Module):
    def forward(self, x):
        return torch.fft.fft(x).abs()


def test_the_plain_program_computes_without_the_model(net):
    """And on an input that it was not recorded with."""
    x = torch.randn(SHAPE)
    with torch.no_grad(), PlainRecorder() as recorder:
        y = net(x)
    other = torch.randn(SHAPE)
    torch.testing.assert_close(plain_replay(recorder.program, (x, y), other), net(other))


def test_the_file_computes_what_the_model_computes(net, exported):
    program = load_pte(exported.path)
    for _ in range(3):
        x = torch.randn(SHAPE)
        torch.testing.assert_close(program(x), net(x), atol=1e-5, rtol=1e-5)


def test_everything_is_delegated(exported):
    delegation = exported.delegation
    assert delegation.share == 1
    assert delegation.subgraphs == 1
    assert delegation.row("convolution").inside == 4
    assert delegation.row("linear").inside == 1
    require_delegated(delegation, operators=["convolution", "linear"])


def test_size_as_predicted(net, exported):
    """The rest is the graph; the folder holds the file, and nothing unfinished."""
    assert exported.bytes == exported.path.stat().st_size
    weights = predicted_pte_bytes(net)
    folded = 8 + 32 + 32 + 8
    assert weights == 4 * (8 * 9 + 8 * 32 + 32 * 9 + 32 * 8 + folded + 8 * 10 + 10)
    assert weights < exported.bytes < weights + 12_000
    assert list(exported.path.parent.iterdir()) == [exported.path]


def test_without_a_backend(net, tmp_path, capfd):
    """Equal numbers, nothing delegated; and not a line of the libraries reaches the terminal."""
    path = tmp_path / "deep" / "portable.pte"
    log = tmp_path / "export.log"
    x = torch.randn(SHAPE)
    net.train()
    plain = export_to_executorch(net, (x,), path=path, delegate=False, log=log)
    assert net.training
    assert (plain.delegation.share, plain.delegation.subgraphs) == (0, 0)
    assert plain.delegation.row("convolution").outside == 4
    assert plain.bytes > predicted_pte_bytes(net, delegate=False)
    torch.testing.assert_close(load_pte(path)(x), net.eval()(x), atol=1e-5, rtol=1e-5)
    assert capfd.readouterr() == ("", "")
    assert log.exists()


def test_a_pooling_that_stays_outside(tmp_path):
    """XNNPACK does not take it, and the portable kernel made an EfficientNet fifty times slower."""
    path = tmp_path / "m.pte"
    x = torch.randn(SHAPE)
    with pytest.raises(ValueError, match=r"1 × avg_pool2d.*AdaptiveAvgPool2d"):
        export_to_executorch(PoolsOverEverything(), (x,), path=path)
    assert list(tmp_path.iterdir()) == []
    got = export_to_executorch(PoolsOverEverything(), (x,), path=path, allow_outside=True)
    assert [row.name for row in got.delegation.outside()] == ["avg_pool2d"]


@pytest.mark.parametrize("model", [Unknown(), NoKernel()])
def test_an_unsupported_operator(model, tmp_path):
    with pytest.raises(ValueError, match="uses an operator that ExecuTorch cannot take"):
        export_to_executorch(model, (torch.randn(4, 4),), path=tmp_path / "m.pte", delegate=False)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_model_or_no_example(net, tmp_path):
    path = tmp_path / "m.pte"
    with pytest.raises(ValueError, match="give a tuple of tensors"):
        export_to_executorch(net, ([1, 2],), path=path)
    with pytest.raises(ValueError, match="does not run on the example"):
        export_to_executorch(net, (torch.randn(1, 3, 16, 16),), path=path)
    with pytest.raises(ValueError, match="path=None: give the name of a file"):
        export_to_executorch(net, (torch.randn(SHAPE),), path=None)
