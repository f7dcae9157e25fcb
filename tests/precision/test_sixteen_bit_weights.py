"""16-bit layers compute what the formula says, by the product that is fast for so many rows."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from recipes_lib.core.data.quality import decode_quality
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.linears import bytes_per_token
from recipes_lib.core.model.sizes import weight_bytes
from recipes_lib.inference.decode_loop import apply_decode_loop
from recipes_lib.precision import _converted_weights as converted_weights
from recipes_lib.precision._converted_weights import converted_product
from recipes_lib.precision.sixteen_bit_weights import (
    DTYPES,
    FEW_ROWS,
    SixteenBitLinear,
    apply_sixteen_bit_weights,
    plain_sixteen_bit_linear,
    predicted_sixteen_bit_bytes,
    sixteen_bit_path,
)

for_both = pytest.mark.parametrize("dtype", DTYPES)


def distance(got, expected):
    return ((got.float() - expected.float()).norm() / expected.float().norm()).item()


def layers(inputs, outputs, dtype, *, bias=True):
    """A layer in fp32, and the same in 16 bits."""
    plain = nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)
    return plain, SixteenBitLinear(copy.deepcopy(plain).to(dtype))


# --- one layer ------------------------------------------------------------------------------------


@for_both
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 33), (50, 7), (7, 1)])
def test_equals_the_plain_product(dtype, rows, inputs, outputs):
    plain, layer = layers(inputs, outputs, dtype)
    x = torch.randn(rows, inputs)
    expected = plain_sixteen_bit_linear(x, plain.weight, plain.bias, dtype)
    assert distance(layer(x.to(dtype)), expected) < 0.01
    assert distance(layer(x), expected) < 0.01 and layer(x).dtype is torch.float32


@for_both
@pytest.mark.parametrize("lead", [(), (1, 1), (2, 3, 4)])
def test_any_leading_shape(dtype, lead):
    plain, layer = layers(32, 20, dtype, bias=False)
    x = torch.randn(*lead, 32)
    y = layer(x.to(dtype))
    assert y.shape == (*lead, 20) and y.dtype is dtype
    assert distance(y, plain(x)) < 0.01


def test_weights_are_converted_in_blocks(monkeypatch):
    """The mistake: parts in the wrong order, or the last one lost where the blocks do not fit."""
    monkeypatch.setattr(converted_weights, "BLOCK_WEIGHTS", 100)
    weight = torch.randn(47, 30).half()
    x = torch.randn(20, 30)
    assert distance(converted_product(x, weight), functional.linear(x, weight.float())) < 0.01
    whole = torch.randint(-127, 128, (47, 30), dtype=torch.int8)
    ones = torch.eye(30)
    assert torch.equal(converted_product(ones, whole).float().t(), whole.float())  # exact


@for_both
def test_the_product_is_picked_by_rows(dtype, monkeypatch):
    """One row without oneDNN, a prompt with it: each of them is slow the other way, and silent."""
    seen = []

    def recorded(x, weight, bias=None):
        seen.append((len(x), x.dtype, torch._C._get_mkldnn_enabled()))
        return torch._C._nn.linear(x, weight, bias)

    _, layer = layers(64, 40, dtype)
    monkeypatch.setattr(functional, "linear", recorded)
    monkeypatch.setattr("recipes_lib.precision._converted_weights.native_bf16_on_cpu", lambda: True)
    few = FEW_ROWS[dtype]
    layer(torch.randn(few, 64).to(dtype))
    layer(torch.randn(few + 1, 64).to(dtype))
    # Only the bf16 product of one row wants oneDNN off.
    assert seen[0] == (few, dtype, dtype is torch.float16)
    assert seen[1] == (few + 1, torch.bfloat16, True)
    assert torch._C._get_mkldnn_enabled()


def test_onednn_is_back_after_an_error():
    _, layer = layers(64, 40, torch.bfloat16)
    with pytest.raises(RuntimeError):
        layer(torch.randn(1, 32).bfloat16())
    assert torch._C._get_mkldnn_enabled()


# --- models ---------------------------------------------------------------------------------------


@for_both
@pytest.mark.parametrize("family", ["tiny-llama", "tiny-qwen2", "tiny-gemma2", "tiny-gpt2"])
def test_a_model_of_each_family(family, dtype):
    model = model_of_shape(family, device="cpu")
    rows = torch.randint(0, 128, (2, 40)).tolist()
    full = decode_quality(model, rows)
    predicted = predicted_sixteen_bit_bytes(model)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    apply_sixteen_bit_weights(model, dtype=dtype)
    quality = decode_quality(model, rows, reference=full.predictions)
    assert quality.perplexity == pytest.approx(full.perplexity, rel=0.01)
    assert quality.agreement > 0.85
    assert weight_bytes(model) == predicted
    still_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert still_tied == tied
    assert not model.training and not any(p.requires_grad for p in model.parameters())


@for_both
def test_a_decoder_reads_half(dtype):
    decoder = apply_decode_loop(model_of_shape("tiny-llama", device="cpu"))
    rows = torch.randint(0, 128, (2, 40)).tolist()
    full = decode_quality(decoder, rows, token_by_token=True)
    before = bytes_per_token(decoder)
    apply_sixteen_bit_weights(decoder, dtype=dtype)
    quality = decode_quality(decoder, rows, token_by_token=True)
    assert quality.perplexity == pytest.approx(full.perplexity, rel=0.01)
    assert bytes_per_token(decoder) == before // 2


def test_rotary_frequencies_are_not_rounded():
    """`model.bfloat16()` rounds them: token 4,000 then looks from another place."""
    reference = model_of_shape("tiny-llama", device="cpu").eval()
    cast = copy.deepcopy(reference).bfloat16()
    ours = apply_sixteen_bit_weights(copy.deepcopy(reference), dtype=torch.bfloat16)
    frequencies = reference.model.rotary_emb.inv_freq
    assert not torch.equal(cast.model.rotary_emb.inv_freq.float(), frequencies)
    assert torch.equal(ours.model.rotary_emb.inv_freq, frequencies)


# --- guards ---------------------------------------------------------------------------------------


def test_the_path_says_what_is_missing(monkeypatch):
    path = "recipes_lib.precision.sixteen_bit_weights.native_bf16_on_cpu"
    monkeypatch.setattr(path, lambda: True)
    fast = sixteen_bit_path("cpu")
    assert fast.dtype is torch.bfloat16 and fast.lacks is None and "oneDNN" in str(fast)
    monkeypatch.setattr(path, lambda: False)
    assert sixteen_bit_path("cpu").dtype is torch.float16
    with pytest.warns(UserWarning, match="no native bf16 products: prompts are computed in fp32"):
        apply_sixteen_bit_weights(model_of_shape("tiny-llama", device="cpu"))


def test_bad_input():
    model = model_of_shape("tiny-llama", device="cpu")
    with pytest.raises(ValueError, match=r"dtype=torch\.float32: choose one of torch\.bfloat16"):
        apply_sixteen_bit_weights(model, dtype=torch.float32)
    with pytest.raises(ValueError, match="no Hugging Face model"):
        apply_sixteen_bit_weights(nn.Linear(3, 3))
    model.lm_head.weight.data[0, 0] = 1e5
    with pytest.raises(ValueError, match=r"beyond 65,504.*choose dtype=torch\.bfloat16"):
        apply_sixteen_bit_weights(model, dtype=torch.float16)
    assert model.dtype is torch.float32
    apply_sixteen_bit_weights(model, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="16-bit weights already"):
        apply_sixteen_bit_weights(model)


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@for_both
def test_on_gpu(dtype):
    model = model_of_shape("tiny-llama", device="cuda")
    rows = torch.randint(0, 128, (2, 40)).tolist()
    full = decode_quality(model, rows)
    apply_sixteen_bit_weights(model, dtype=dtype)
    assert decode_quality(model, rows).perplexity == pytest.approx(full.perplexity, rel=0.01)
    assert sixteen_bit_path("cuda").lacks is None
