import pytest
import torch
from torch import nn

from recipes_lib.edge.onnx_export import (
    export_to_onnx,
    load_onnx,
    operators_that_run,
    overflows_in_16_bits,
    plain_whole_number_layer,
    predicted_onnx_bytes,
    quantize_onnx,
)
from tests.edge.conftest import SHAPE, small_net


class NoCounterpart(nn.Module):
    def forward(self, x):
        return torch.linalg.svdvals(x)


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
    x = torch.randn(9, 30)
    weight = torch.randn(7, 30)
    got = plain_whole_number_layer(x, weight)
    assert 0 < (got - x @ weight.T).abs().max() < 0.02 * (x @ weight.T).abs().max()
    on_the_grid = torch.tensor([[0.0, 1.0, 255.0]])
    whole = torch.tensor([[127.0, -1.0, 3.0]])
    assert plain_whole_number_layer(on_the_grid, whole).item() == 764


def test_the_file_computes_what_the_model_computes(net, exported):
    model = load_onnx(exported.path)
    for size in (1, 5):
        x = images(size)
        torch.testing.assert_close(model(x), net(x), atol=1e-5, rtol=1e-5)


def test_size_as_predicted(net, exported, quantized, quantized_throughout):
    throughout = predicted_onnx_bytes(net, quantized=True, first_in_fp32=False)
    for file, predicted in (
        (exported, predicted_onnx_bytes(net)),
        (quantized, predicted_onnx_bytes(net, quantized=True)),
        (quantized_throughout, throughout),
    ):
        assert file.bytes == file.path.stat().st_size
        assert predicted < file.bytes < predicted + 12_000
    # The stem has 8 channels of 3 x 3 filters: three bytes more a weight, five less a channel.
    assert predicted_onnx_bytes(net, quantized=True) - throughout == 3 * 72 - 5 * 8


def test_eight_bits_are_near(net, quantized):
    x = images(9)
    expected = net(x)
    got = load_onnx(quantized.path)(x)
    tolerance = 0.03
    if overflows_in_16_bits():
        tolerance = 0.06  # 7 bits
    assert 0 < (got - expected).abs().max() < tolerance * expected.abs().max()


def weights_in_whole_numbers(path):
    """Their names and types."""
    import onnx

    tensors = onnx.load(str(path)).graph.initializer
    return {
        tensor.name: tensor.data_type
        for tensor in tensors
        if tensor.name.endswith("weight_quantized")
    }


def test_the_layers_are_in_whole_numbers(quantized, quantized_throughout):
    import onnx

    throughout = weights_in_whole_numbers(quantized_throughout.path)
    assert len(throughout) == 5
    found = weights_in_whole_numbers(quantized.path)
    [in_fp32] = set(throughout) - set(found)
    assert "stem" in in_fp32
    # VNNI multiplies unsigned activations by signed weights. Other types take slower kernels.
    assert set(found.values()) == {onnx.TensorProto.INT8}
    graph = onnx.load(str(quantized.path)).graph
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    of_activations = {
        kinds[node.input[2]] for node in graph.node if node.op_type == "QuantizeLinear"
    }
    assert of_activations == {onnx.TensorProto.UINT8}
    assert not any(node.metadata_props for node in graph.node)


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
    assert predicted_onnx_bytes(net, quantized=True) == predicted_onnx_bytes(
        net, quantized=True, first_in_fp32=False
    )


def test_a_file_with_nothing_to_quantize(tmp_path):
    net = nn.Conv2d(3, 8, 3)
    exported = export_to_onnx(net, (torch.randn(1, 3, 8, 8),), path=tmp_path / "m.onnx")
    calibration = torch.randn(8, 3, 8, 8)
    with pytest.raises(ValueError, match="nothing to quantize"):
        quantize_onnx(exported.path, calibration=calibration, to=tmp_path / "q.onnx")
    assert not (tmp_path / "q.onnx").exists()
    quantize_onnx(
        exported.path, calibration=calibration, to=tmp_path / "q.onnx", first_in_fp32=False
    )


def test_loading_is_silent_and_measured(exported, capfd):
    model = load_onnx(exported.path)
    model(images(1))
    assert capfd.readouterr() == ("", "")
    assert 0 < model.load_seconds < 5
    with pytest.raises(ValueError, match="threads=0"):
        load_onnx(exported.path, threads=0)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((torch.zeros(1, 3, 16, 16),), r"not \[1, 3, 16, 16\]"),
        ((torch.zeros(1, 16, 16),), r"not \[1, 16, 16\]"),
        ((), "give inputs of these shapes"),
        ((torch.zeros(SHAPE).double(),), "torch.float64"),
        (("image",), "str is no tensor"),
    ],
)
def test_other_inputs(exported, inputs, message):
    with pytest.raises(ValueError, match=message):
        load_onnx(exported.path)(*inputs)


@pytest.mark.parametrize(
    ("calibration", "message"),
    [
        (torch.zeros(0, *SHAPE[1:]), "give at least one example"),
        ([], "calibration is of type list"),
        (torch.full(SHAPE, float("nan")), "not finite"),
        (torch.ones(2, 3, 16, 16), "give inputs of these shapes"),
        (torch.zeros(SHAPE), "zero everywhere"),
    ],
)
def test_calibration_sets(exported, calibration, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        quantize_onnx(exported.path, calibration=calibration, to=tmp_path / "q.onnx")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_exported_or_loaded(tmp_path, capfd):
    path = tmp_path / "m.onnx"
    with pytest.raises(ValueError, match="uses an operator that ONNX does not have"):
        export_to_onnx(NoCounterpart(), (torch.randn(4, 4),), path=path)
    with pytest.raises(ValueError, match="path=None: give the name of a file"):
        export_to_onnx(NoCounterpart(), (torch.randn(4, 4),), path=None)
    assert list(tmp_path.iterdir()) == []
    for read in (load_onnx, operators_that_run):
        path.unlink(missing_ok=True)
        with pytest.raises(ValueError, match="does not exist"):
            read(path)
        path.write_text("no graph")
        with pytest.raises(ValueError, match="cannot be loaded"):
            read(path)
    assert capfd.readouterr() == ("", "")


def test_a_file_is_quantized_once(quantized, tmp_path):
    """The second rounding made a larger file with other numbers."""
    with pytest.raises(ValueError, match=r"q\.onnx is quantized already"):
        quantize_onnx(quantized.path, calibration=images(), to=tmp_path / "twice.onnx")
    with pytest.raises(ValueError, match=r"to=.* is a folder"):
        quantize_onnx(quantized.path, calibration=images(), to=tmp_path)
    with pytest.raises(ValueError, match="per_channel='no': give True or False"):
        quantize_onnx(quantized.path, calibration=images(), to=tmp_path / "a", per_channel="no")
