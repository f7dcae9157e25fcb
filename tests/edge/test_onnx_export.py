import pytest
import torch
from torch import nn

from recipes_lib.edge.onnx_export import (
    export_to_onnx,
    load_onnx,
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


def test_size_as_predicted(net, exported, quantized):
    for file, predicted in (
        (exported, predicted_onnx_bytes(net)),
        (quantized, predicted_onnx_bytes(net, quantized=True)),
    ):
        assert file.bytes == file.path.stat().st_size
        assert predicted < file.bytes < predicted + 12_000


def test_eight_bits_are_near(net, quantized):
    x = images(9)
    expected = net(x)
    got = load_onnx(quantized.path)(x)
    tolerance = 0.03
    if overflows_in_16_bits():
        tolerance = 0.06  # 7 bits
    assert 0 < (got - expected).abs().max() < tolerance * expected.abs().max()


def test_the_layers_are_in_whole_numbers(quantized):
    import onnx

    graph = onnx.load(str(quantized.path)).graph
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    of_weights = [name for name in kinds if name.endswith("weight_quantized")]
    assert len(of_weights) == 5
    assert {kinds[name] for name in of_weights} == {onnx.TensorProto.INT8}
    assert not any(node.metadata_props for node in graph.node)


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
        (torch.zeros(2, 3, 16, 16), "give inputs of these shapes"),
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
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="does not exist"):
        load_onnx(path)
    path.write_text("no graph")
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_onnx(path)
    assert capfd.readouterr() == ("", "")
