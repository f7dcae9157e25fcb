"""16-bit layers compute what the formula says, by the product that is fast for so many rows."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from recipes_lib.core.data.losses_and_answers import decode_quality
from recipes_lib.core.model import model_of_shape
from recipes_lib.precision import _converted_weights as converted_weights
from recipes_lib.precision import sixteen_bit_weights
from recipes_lib.precision._converted_weights import converted_product, product_dtype
from recipes_lib.precision.sixteen_bit_weights import (
    DTYPES,
    FEW_ROWS,
    SixteenBitLinear,
    apply_sixteen_bit_weights,
    plain_sixteen_bit_linear,
    sixteen_bit_path,
)
from tests.conftest import distance
from tests.families.configs import quiet, tiny_model

for_both = pytest.mark.parametrize("dtype", DTYPES)


def layers(inputs, outputs, dtype, *, bias=True):
    """A layer in fp32, and the same in 16 bits."""
    plain = nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)
    return plain, SixteenBitLinear(copy.deepcopy(plain).to(dtype))


# --- one layer ------------------------------------------------------------------------------------


@for_both
@pytest.mark.parametrize("shape", [(2, 20, 64), (50,), (3, 7)])
def test_equals_the_plain_product(dtype, shape):
    """The mistake: a path for some number of rows that forgets the bias, or the dtype."""
    plain, layer = layers(shape[-1], 33, dtype)
    x = torch.randn(shape)
    expected = plain_sixteen_bit_linear(x, plain.weight, plain.bias, dtype)
    assert distance(layer(x.to(dtype)), expected) < 0.01
    assert distance(layer(x), expected) < 0.01 and layer(x).dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16])
def test_blocks_make_the_whole_product(dtype, monkeypatch):
    """The mistake: a last block that is not full is lost, or blocks are joined along the rows."""
    monkeypatch.setattr(converted_weights, "BLOCK_WEIGHTS", 3 * 20)  # blocks of 3, 3 and 1 outputs
    x = torch.randn(5, 20)
    weight = torch.randint(-127, 128, (7, 20)).to(dtype)  # exact in each dtype
    expected = x.to(product_dtype(x)).double() @ weight.double().T
    got = converted_product(x, weight)
    assert got.shape == (5, 7)
    torch.testing.assert_close(got.double(), expected, rtol=0.02, atol=2.0)


@for_both
def test_the_product_is_picked_by_rows(dtype, monkeypatch):
    """One row without oneDNN, a prompt with it: each of them is slow the other way, and silent."""
    seen = []

    def recorded(x, weight, bias=None):
        seen.append((len(x), x.dtype, torch._C._get_mkldnn_enabled()))
        return torch._C._nn.linear(x, weight, bias)

    _, layer = layers(64, 40, dtype)
    monkeypatch.setattr(functional, "linear", recorded)
    monkeypatch.setattr(converted_weights, "native_bf16_on_cpu", lambda: True)
    few = FEW_ROWS[dtype]
    layer(torch.randn(few, 64).to(dtype))
    layer(torch.randn(few + 1, 64).to(dtype))
    # Only the bf16 product of one row wants oneDNN off.
    assert seen[0] == (few, dtype, dtype is torch.float16)
    assert seen[1] == (few + 1, torch.bfloat16, True)
    assert torch._C._get_mkldnn_enabled()


# --- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "dtype"), [("tiny-llama", torch.bfloat16), ("tiny-gpt2", torch.float16)]
)
def test_a_model_of_each_family(family, dtype):
    """The mistakes: tables that are no longer one, and frequencies of rotary positions that are
    rounded as well: token 4,000 then looks from another place."""
    model = model_of_shape(family, device="cpu")
    reference = copy.deepcopy(model)
    rows = torch.randint(0, 128, (2, 40)).tolist()
    full = decode_quality(model, rows)
    apply_sixteen_bit_weights(model, dtype=dtype)
    quality = decode_quality(model, rows, reference=full.predictions)
    assert quality.perplexity == pytest.approx(full.perplexity, rel=0.01)
    assert quality.agreement > 0.85
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert all(weight.dtype is dtype for weight in model.parameters())
    for name, buffer in reference.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer)
    assert not model.training and not any(p.requires_grad for p in model.parameters())


def test_buffers_are_those_that_transformers_loads(tmp_path):
    """The mistake: a table of positions in fp32, which its family makes in the model's dtype."""
    with quiet():
        model = tiny_model("openai-gpt")
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    wrapped = torch.nn.ModuleDict({"model": model})  # as peft and the compiler have it inside
    made = {name for name, buffer in loaded.named_buffers() if buffer.dtype is torch.bfloat16}
    found = sixteen_bit_weights._buffers_made_in(wrapped, torch.bfloat16)
    assert found == {f"model.{name}" for name in made} != set()


def test_the_path_says_what_is_missing(llama, monkeypatch):
    """The mistake: bf16 on a CPU that emulates it, which is slower than fp32."""
    path = "recipes_lib.precision.sixteen_bit_weights.native_bf16_on_cpu"
    monkeypatch.setattr(path, lambda: True)
    fast = sixteen_bit_path("cpu")
    assert fast.dtype is torch.bfloat16 and fast.lacks is None and "oneDNN" in str(fast)
    monkeypatch.setattr(path, lambda: False)
    assert sixteen_bit_path("cpu").dtype is torch.float16
    with pytest.warns(UserWarning, match="no native bf16 products: prompts are computed in fp32"):
        apply_sixteen_bit_weights(llama)
