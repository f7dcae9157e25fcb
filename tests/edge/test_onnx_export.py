"""An .onnx file in fp32 and in whole numbers, from all sides."""

import pytest
import torch
from torch import nn

from recipes_lib.edge.onnx_export import (
    export_to_onnx,
    load_onnx,
    operators_that_run,
    overflows_in_16_bits,
    plain_whole_number_layer,
    quantize_onnx,
)
from tests.edge.conftest import SHAPE, small_net


def images(number=64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(number, *SHAPE[1:], generator=generator)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("onnx")


@pytest.fixture(scope="module")
def exported(folder):
    return export_to_onnx(small_net(), (images(2),), path=folder / "m.onnx", any_batch=True)


@pytest.fixture(scope="module")
def quantized_throughout(folder, exported):
    path = folder / "throughout.onnx"
    return quantize_onnx(exported.path, calibration=images(), to=path, first_in_fp32=False)


@pytest.fixture(scope="module")
def quantized(folder, exported):
    return quantize_onnx(exported.path, calibration=images(), to=folder / "q.onnx")


def test_a_layer_in_whole_numbers():
    """The zero of x forgotten in the sums; sums that are cut off at 8 bits."""
    x = torch.randn(9, 30)
    weight = torch.randn(7, 30)
    got = plain_whole_number_layer(x, weight)
    assert 0 < (got - x @ weight.T).abs().max() < 0.02 * (x @ weight.T).abs().max()
    on_the_grid = torch.tensor([[0.0, 1.0, 255.0]])
    whole = torch.tensor([[127.0, -1.0, 3.0]])
    assert plain_whole_number_layer(on_the_grid, whole).item() == 764


def test_the_file_computes_what_the_model_computes(net, exported, capfd):
    """A file of one batch size; and what the runtime prints reaches nobody."""
    model = load_onnx(exported.path)
    for size in (1, 5):
        x = images(size)
        torch.testing.assert_close(model(x), net(x), atol=1e-5, rtol=1e-5)
    assert 0 < model.load_seconds < 5
    assert capfd.readouterr() == ("", "")


def test_eight_bits_are_near(net, quantized):
    """Nothing rounded; or sums that overflow, as they do without VNNI where weights have 8 bits."""
    x = images(9)
    expected = net(x)
    got = load_onnx(quantized.path)(x)
    tolerance = 0.03
    if overflows_in_16_bits():
        tolerance = 0.06  # 7 bits
    assert 0 < (got - expected).abs().max() < tolerance * expected.abs().max()


def test_the_layers_run_in_whole_numbers(exported, quantized, quantized_throughout):
    """The mistake: the file has weights of 8 bits, but the session computes in fp32 around them.

    A ReLU6 must be a part of its convolution, as must be all steps between whole numbers and fp32.
    """
    in_fp32 = operators_that_run(exported.path)
    assert in_fp32["FusedConv"] + in_fp32["Conv"] == 4
    found = operators_that_run(quantized.path)
    # The stem; then expand, depthwise and project, and their sum; and the head.
    assert (found["Conv"], found["QLinearConv"], found["QGemm"]) == (1, 3, 1)
    assert found["QLinearAdd"] == 1
    # The step into 8 bits cuts off what ReLU6 would: even behind the stem it is gone.
    assert {"Clip", "FusedConv", "Gemm", "Add"}.isdisjoint(found)
    # One step into whole numbers behind the stem, and around the mean one out and one in.
    assert (found["QuantizeLinear"], found["DequantizeLinear"]) == (2, 2)
    throughout = operators_that_run(quantized_throughout.path)
    assert throughout["QLinearConv"] == 4
    assert "Conv" not in throughout


def test_only_what_reads_an_image_stays(tmp_path):
    """A depthwise filter reads one channel as well; with 8 groups it is no first layer."""
    net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU6(), nn.Conv2d(8, 8, 3, groups=8)).eval()
    exported = export_to_onnx(net, (torch.randn(1, 4, 8, 8),), path=tmp_path / "m.onnx")
    calibration = torch.randn(8, 4, 8, 8)
    quantized = quantize_onnx(exported.path, calibration=calibration, to=tmp_path / "q.onnx")
    assert operators_that_run(quantized.path)["QLinearConv"] == 2


def test_a_file_with_nothing_to_quantize(tmp_path):
    """A fixed batch of 1 as well: the calibration goes through one by one."""
    net = nn.Conv2d(3, 8, 3)
    exported = export_to_onnx(net, (torch.randn(1, 3, 8, 8),), path=tmp_path / "m.onnx")
    calibration = torch.randn(8, 3, 8, 8)
    with pytest.raises(ValueError, match="0 layers could be quantized"):
        quantize_onnx(exported.path, calibration=calibration, to=tmp_path / "q.onnx")
    assert not (tmp_path / "q.onnx").exists()
    quantize_onnx(
        exported.path, calibration=calibration, to=tmp_path / "q.onnx", first_in_fp32=False
    )
