"""Int8 layers compute what the formula says, for any shape, and refuse what they cannot do."""

import copy
import io

import pytest
import torch
from torch import nn

from recipes_lib.core.data.losses_and_answers import decode_quality
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.decoding import greedy
from recipes_lib.core.model.linears import linear_layers, output_layer_name
from recipes_lib.inference.decode_loop import apply_decode_loop
from recipes_lib.precision.int8 import (
    KINDS,
    apply_int8,
    int8_linear,
    plain_dynamic,
    plain_quantize,
    plain_two_halves,
    plain_weight_only,
    quantize_rows,
)
from recipes_lib.precision.int8 import (
    packed_weights as kernels,
)
from recipes_lib.precision.int8.sensitivity import (
    Sensitivity,
    groups_by_place,
    sensitive_layers,
    sensitivity,
)
from tests.conftest import distance

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
for_each_kind = pytest.mark.parametrize("kind", KINDS)
needs_fbgemm = pytest.mark.skipif(
    not kernels.has_packed_kernel(torch.device("cpu")), reason="no FBGEMM"
)


def linear(inputs, outputs, *, bias=False):
    return nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)


@pytest.fixture
def without_vnni(monkeypatch):
    """As on older processors, where two halves of 7 bits would be coarser than bf16."""
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)


# --- the idea -------------------------------------------------------------------------------------


def test_rows_are_quantized_as_in_the_idea():
    """A scale that is rounded after it has divided would be another one than that of the kernel."""
    weight = torch.randn(50, 30)
    weight[3] = 0
    rest = torch.arange(50) != 3
    whole, scale = quantize_rows(weight)
    expected, expected_scale = plain_quantize(weight[rest])
    assert torch.equal(whole[rest].float(), expected)
    assert torch.equal(scale[rest].float(), expected_scale)
    assert not whole[3].any() and scale.isfinite().all()  # no division by zero


# Rows: for the kernel of few rows and for the matrix product. Widths: with and without a remainder.
@pytest.mark.parametrize(("inputs", "outputs", "rows"), [(64, 33, 40), (50, 7, 40), (7, 1, 1)])
def test_equals_the_plain_products(inputs, outputs, rows):
    """The mistake: another step of the activations than the one of the formula."""
    layer = linear(inputs, outputs)
    x = torch.randn(rows, inputs)
    weight_only = int8_linear(layer, kind="weight_only")(x)
    assert distance(weight_only, plain_weight_only(x, layer.weight)) < 0.01  # 16-bit activations
    dynamic = int8_linear(layer, kind="dynamic")(x)
    assert distance(dynamic, plain_dynamic(x, layer.weight)) < 0.003
    per_token = int8_linear(layer, kind="per_token")(x)
    assert distance(per_token, plain_weight_only(x, layer.weight)) < 0.02


# --- a token and its neighbours -------------------------------------------------------------------


@needs_fbgemm
@pytest.mark.parametrize("kind", ["weight_only", "per_token"])
@pytest.mark.parametrize(("size", "mean"), [(1, 0), (3000, 0), (1e-4, 1000)])
@pytest.mark.parametrize(("inputs", "outputs"), [(160, 64), (50, 7), (64, 40)])
def test_a_token_does_not_depend_on_its_neighbours(kind, size, mean, inputs, outputs):
    """To the last bit, whatever stands behind it, and in any batch: drafts are exact only so.

    The mistakes: a row that reaches beyond 1 and decides the scale of all, also by one ulp, and
    where its middle is rounded (numbers between 1000 and 1000.0001); a sum that is rounded once or
    twice, depending on how many rows there are; one token alone that other operators round.
    """
    if kernels.reduced_range() and kind == "weight_only":
        pytest.skip("this machine has no VNNI: kernels for few rows round otherwise")
    for seed in range(5):
        layer = int8_linear(linear(inputs, outputs), kind=kind)
        x = mean + min(size, 1) * torch.randn(9, inputs)
        x[:, 3] = mean + size * torch.randn(9)
        expected = layer(x)
        for rows in (1, 2, 4):
            assert torch.equal(torch.cat([layer(part) for part in x.split(rows)]), expected)
        other = torch.cat([x[:5], 10.0 ** (seed - 2) * torch.randn(4, inputs)])
        assert torch.equal(layer(other)[:5], expected[:5])


@needs_fbgemm
@pytest.mark.parametrize("rows", [1, 40])
def test_two_halves_are_those_of_the_idea(rows):
    """A half that is rounded a second time would be as coarse as 8 bits, and nobody would see it.

    A row of zeros, a tiny and a large one beside it must not matter.
    """
    layer = linear(50, 33)
    x = torch.randn(rows, 50)
    quantized = int8_linear(layer, kind="weight_only")
    assert distance(quantized(x), plain_weight_only(plain_two_halves(x), layer.weight)) < 1e-5
    assert distance(plain_two_halves(x), x) < 1e-4
    together = quantized(torch.cat([torch.zeros(1, 50), 1e-7 * x, 1e4 * x, x]))
    assert not together[0].any()
    assert torch.equal(together[-rows:], quantized(x))  # to the last bit
    assert distance(together[1 : 1 + rows], 1e-7 * quantized(x)) < 1e-4


# --- the silent traps of the operators ------------------------------------------------------------


@pytest.mark.usefixtures("without_vnni")
@pytest.mark.parametrize(("width", "rows"), [(64, 1), (24, 1), (64, kernels.GEMM_FROM_ROWS)])
def test_the_kernel_for_few_rows(width, rows, monkeypatch):
    """The mistakes: another dtype, and many rows (right, and several times as slow); a width that
    is no multiple of 16, where it reads beyond each row; a view that begins anywhere."""
    given = []
    kernel = torch.ops.aten._weight_int8pack_mm

    def recorded(x, weight, scale):
        given.append((x.dtype, scale.dtype, x.data_ptr() % 32))
        return kernel(x, weight, scale)

    monkeypatch.setattr(torch.ops.aten, "_weight_int8pack_mm", recorded)
    layer = linear(width, 40)
    for dtype in DTYPES:
        x = torch.randn(rows * width + 1).to(dtype)[1:].view(rows, width)
        assert distance(int8_linear(layer)(x), layer(x.float())) < 0.02
    fits = width == 64 and rows == 1
    assert given == [(torch.bfloat16, torch.bfloat16, 0)] * (3 if fits else 0)


@pytest.mark.parametrize(("kind", "size"), [("dynamic", 1e-6), ("per_token", 1e-7)])
def test_tiny_and_large_activations(kind, size):
    """Left to itself, the operator has no step below 6.1e-5: activations of 1e-7 become zeros."""
    layer = linear(64, 40)
    for factor in (size, 1e4):
        x = factor * torch.randn(3, 64)
        assert distance(int8_linear(layer, kind=kind)(x), layer(x)) < 0.02


def test_activations_have_7_bits_without_vnni(monkeypatch):
    """Sums of two products of 8 bits do not fit into 16: such processors cut them off."""
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    with pytest.warns(UserWarning, match="7 bits"):
        apply_int8(model_of_shape("tiny-llama", device="cpu"), kind="dynamic")
    layer = linear(64, 40)
    x = torch.randn(3, 64)
    coarse = distance(int8_linear(layer, kind="dynamic")(x), plain_weight_only(x, layer.weight))
    monkeypatch.undo()
    fine = distance(int8_linear(layer, kind="dynamic")(x), plain_weight_only(x, layer.weight))
    assert coarse == pytest.approx(2 * fine, rel=0.3)


def test_without_fbgemm_the_slower_path_is_right(monkeypatch):
    """The mistake: a machine without the library gets zeros, or no model at all."""
    monkeypatch.setattr(kernels, "has_packed_kernel", lambda device: False)
    layer = linear(50, 33, bias=True)
    x = torch.randn(2, 5, 50)
    for kind in KINDS:
        assert distance(int8_linear(layer, kind=kind)(x), layer(x)) < 0.02


# --- the module -----------------------------------------------------------------------------------


@for_each_kind
def test_saved_loaded_copied_and_cast(kind):
    """A file does not depend on the kind; scales in fp16 would lose digits, and say nothing."""
    small = linear(64, 40, bias=True)
    small.weight *= 1e-5
    quantized = int8_linear(small, kind=kind)
    x = torch.randn(3, 64)
    expected = quantized(x)
    weight = quantized.dequantized()
    assert distance(weight, small.weight) < 0.01
    file = io.BytesIO()
    torch.save(quantized.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    assert state["weight"].dtype is torch.int8
    for other_kind in KINDS:
        other = int8_linear(linear(64, 40, bias=True), kind=other_kind)
        other.load_state_dict(state)
        state["weight"].zero_()  # what was loaded is the layer's own
        assert torch.equal(other.dequantized(), weight)
        state["weight"] = quantized.plain().clone()
    twin = copy.deepcopy(quantized)
    assert torch.equal(twin(x), expected)
    assert torch.equal(twin.half().dequantized(), weight)
    with pytest.raises(RuntimeError, match=r"torch.float32: give whole numbers"):
        quantized.load_state_dict(small.state_dict() | {"scale": torch.ones(40)})


# --- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["per_token", "dynamic"])
def test_a_model(kind):
    """The mistake: a layer of the blocks that is left out, or an output layer that is not."""
    model = model_of_shape("tiny-gemma2", device="cpu")
    rows = torch.randint(0, 128, (2, 40)).tolist()
    full = decode_quality(model, rows)
    apply_int8(model, kind=kind)
    quantized = decode_quality(model, rows, reference=full.predictions)
    assert quantized.perplexity == pytest.approx(full.perplexity, rel=0.01)
    assert quantized.agreement > 0.9
    assert [*linear_layers(model)] == [output_layer_name(model)]
    assert not model.training and not any(p.requires_grad for p in model.parameters())


def test_no_gradient_is_lost_in_silence():
    """The kernels have no backward: without the guard, what is below would not train."""
    model = apply_int8(model_of_shape("tiny-llama", device="cpu"), kind="dynamic")
    model.get_input_embeddings().requires_grad_(True)
    with pytest.raises(ValueError, match="no backward"):
        model(input_ids=torch.randint(0, 128, (1, 5)))


# --- which layers suffer --------------------------------------------------------------------------


def test_the_scan_finds_the_layer_with_an_outlier():
    """One huge weight takes all steps of its row. The model is as it was afterwards."""
    model = model_of_shape("tiny-llama", device="cpu")
    mlp = model.model.layers[1].mlp
    with torch.no_grad():
        mlp.down_proj.weight.mul_(300)
        # The huge weights meet zeros only, and change nothing themselves.
        mlp.down_proj.weight[:, 5] = 10_000
        mlp.up_proj.weight[5] = 0
    # Its own answers: whatever changes the model makes them less likely.
    rows = [[start, *greedy(apply_decode_loop(model), [start], new_tokens=40)] for start in (3, 4)]
    before = decode_quality(model, rows)
    scan = sensitivity(model, rows, kind="weight_only", groups=groups_by_place(model))
    assert scan[0].group == "down_proj" and len(scan) == 8
    assert decode_quality(model, rows).perplexity == before.perplexity


def test_the_worst_groups_stay_until_the_rest_is_small_enough():
    """By the damage per weight: a large group may do most and still not be worth its bytes."""
    scan = [
        Sensitivity("large", ("a", "b"), 0.03, 0.9, 1000),
        Sensitivity("small", ("c",), 0.02, 0.9, 10),
        Sensitivity("fine", ("d",), 0.004, 0.9, 100),
    ]
    assert sensitive_layers(scan, most_divergence=0.06) == []
    assert sensitive_layers(scan, most_divergence=0.04) == ["c"]
    assert sensitive_layers(scan, most_divergence=0.0) == ["c", "d", "a", "b"]


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@for_each_kind
@pytest.mark.parametrize("rows", [1, 17, 40])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 48), (50, 33), (2048, 8)])
def test_on_gpu(kind, rows, inputs, outputs):
    """cuBLAS refuses few rows and odd widths; a move to the GPU unpacks the weights; sums of 2,048
    whole numbers pass the end of fp16."""
    layer = linear(inputs, outputs, bias=True)
    layer.weight.data.abs_()
    x = torch.rand(rows, inputs) * 8
    expected = layer(x)
    quantized = int8_linear(layer, kind=kind).to("cuda")
    for dtype in DTYPES:
        assert distance(quantized(x.to("cuda", dtype)).cpu(), expected) < 0.03
    assert distance(quantized.cpu()(x), expected) < 0.03
