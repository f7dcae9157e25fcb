"""Four-bit layers compute with the nearest levels of their grid, on the fast path, anywhere."""

import copy

import pytest
import torch
from torch import nn

from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.bytes_of_tensors import weight_bytes
from recipes_lib.core.model.linears import linear_layers, output_layer_name
from recipes_lib.precision import int4 as module
from recipes_lib.precision._four_bit_grid import in_four_bits
from recipes_lib.precision.int4 import Int4Linear, apply_int4, int4_linear, plain_int4
from tests.small_models import small_model


def linear(inputs=128, outputs=48, *, bias=False):
    return nn.Linear(inputs, outputs, bias=bias)


# --- one layer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [32, 64, 128])
def test_equals_the_plain_rounding(group):
    """Also shows that levels survive packing: another layout would be other weights."""
    layer = linear()
    packed = int4_linear(layer, group=group)
    assert torch.equal(packed.dequantized(), plain_int4(layer.weight.detach(), group=group))
    stored = weight_bytes(packed) / layer.weight.numel()
    assert stored == packed.bytes_per_weight == 0.5 + 4 / group


@pytest.mark.parametrize("symmetric", [False, True])
def test_levels_are_the_nearest_of_the_stored_grid(symmetric):
    """The mistake: levels for the exact scale, which is not the one that is stored; and a search
    of AWQ's scales on another grid than that."""
    weight = torch.randn(64, 512)
    weight[0] = 0.75  # a group without spread has the scale 0
    weight[1] = 0
    layer = linear(512, 64)
    layer.weight.data.copy_(weight)
    grid = int4_linear(layer, group=32, symmetric=symmetric).grid()
    short = in_four_bits(weight, group=32, symmetric=symmetric)
    torch.testing.assert_close(short, grid.weight(), rtol=1e-6, atol=1e-7)
    assert not grid.weight()[1].any()
    error = (grid.weight() - weight).abs()
    for step in (-1, 1):
        levels = (grid.levels.int() + step).clamp(0, 15).to(torch.uint8)
        other = (grid._replace(levels=levels).weight() - weight).abs()
        assert (error <= other + 1e-9).all()
    if symmetric:
        assert not grid.offsets.any() and grid.levels.min() >= 1


CASES = [(torch.float32, (128,)), (torch.bfloat16, (2, 3, 128)), (torch.float16, (3, 0, 128))]


@pytest.mark.parametrize(("dtype", "shape"), CASES)
def test_output_is_that_of_the_rounded_weight(dtype, shape, monkeypatch):
    """In the dtype that came in. The kernel sees bf16 only: else it is right, and slow (trap 1)."""
    given = []

    def recorded(rows, *others):
        given.append(rows.dtype)
        return multiply(rows, *others)

    layer = linear(bias=True)
    packed = int4_linear(layer, group=32)
    multiply = module.multiply
    x = torch.randn(shape, dtype=dtype)
    exact = x.bfloat16().float() @ packed.dequantized().T + layer.bias
    monkeypatch.setattr(module, "multiply", recorded)
    y = packed(x)
    assert y.dtype is dtype
    torch.testing.assert_close(y.float(), exact.detach(), rtol=2**-7, atol=2**-7)
    assert given == [torch.bfloat16]


def test_a_file_holds_levels_in_plain_order():
    """Trap 2: packed bytes of AVX-512 are other weights for AVX2, and nothing says so."""
    packed = int4_linear(linear(outputs=64))
    state = packed.state_dict()
    levels = packed.grid().levels
    assert "packed" not in state
    assert torch.equal(state["levels"], levels[:, ::2] | levels[:, 1::2] << 4)
    other = int4_linear(linear(outputs=64))
    other.load_state_dict(state)
    assert torch.equal(other.dequantized(), packed.dequantized())


# --- a model --------------------------------------------------------------------------------------


def test_every_linear_layer_of_the_blocks_and_no_other():
    """The mistake: a layer that stays in fp32. What they compute, tests/families compares."""
    model = model_of_shape("tiny-gemma2", device="cpu").eval()
    names = [name for name in linear_layers(model) if name != output_layer_name(model)]
    assert apply_int4(model) is model
    found = [name for name, layer in model.named_modules() if isinstance(layer, Int4Linear)]
    assert found == names and len(names) == 14
    with pytest.raises(ValueError, match="quantized already, with apply_int4"):
        apply_int4(model)


def test_a_group_that_does_not_divide_is_refused():
    """The mistake: found half-way, and some layers are rounded already."""
    model = small_model("Llama", intermediate_size=100)
    with pytest.raises(ValueError, match=r"has 100 inputs.*leave it out"):
        apply_int4(model, group=64)
    assert not any(isinstance(layer, Int4Linear) for layer in model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_without_a_kernel(dtype, monkeypatch):
    """A T4 has no bf16, and a notebook that stops there is of no use: numbers are multiplied."""
    layer = linear(bias=True)
    expected = int4_linear(layer, group=32).dequantized()
    monkeypatch.setattr(module, "has_kernel", lambda device: False)
    monkeypatch.setattr(module, "in_bytes", lambda packed: True)
    there = int4_linear(layer, group=32)
    assert torch.equal(there.dequantized(), expected)
    assert there.packed.nbytes == layer.weight.numel() / 2
    x = torch.randn(3, 128, dtype=dtype)
    exact = x.float() @ expected.T + layer.bias
    assert there(x).dtype is dtype
    assert (there(x) - exact).norm() < 0.01 * exact.norm()


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("group", [32, 64, 128])
def test_cuda_computes_with_the_same_levels(group):
    layer = linear(256, 64, bias=True)
    packed = int4_linear(layer, group=group)
    expected = packed.dequantized()
    moved = copy.deepcopy(packed).cuda()
    made_there = int4_linear(layer.cuda(), group=group)
    x = torch.randn(3, 256, device="cuda")
    for there in (moved, made_there):
        assert torch.equal(there.dequantized().cpu(), expected)
        exact = x.bfloat16().float() @ expected.cuda().T + layer.bias
        error = (there(x) - exact).norm() / exact.norm()
        assert error < 0.01
    assert torch.equal(moved.cpu().packed, packed.packed)
