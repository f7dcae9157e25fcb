import pytest
import torch

from recipes_lib.core.measure import bytes_alive
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.decoding import KeyValueCache, greedy
from recipes_lib.inference.decode_loop import apply_decode_loop
from recipes_lib.inference.kv_cache import (
    Int8KeyValueCache,
    apply_int8_cache,
    dequantized,
    quantized,
)
from recipes_lib.inference.speculative import prompt_lookup_generate, row_difference


def tiny_decoder(shape="tiny-llama"):
    return apply_decode_loop(model_of_shape(shape, device="cpu"))


# --- what is stored -------------------------------------------------------------------------------


def test_codes_and_scales_by_hand():
    """The mistake: a large token rounds a small one to zero, as with one scale for all."""
    x = torch.tensor([[127.0, -63.6, 0.4], [0.0127, 0.01, 0.0], [0.0, 0.0, 0.0]])
    codes, scale = quantized(x)
    assert codes.tolist() == [[127, -64, 0], [127, 100, 0], [0, 0, 0]]
    torch.testing.assert_close(scale, torch.tensor([[1.0], [0.0001], [0.0]]))
    torch.testing.assert_close(
        dequantized(codes, scale, torch.float32)[:2],
        torch.tensor([[127.0, -64.0, 0.0], [0.0127, 0.01, 0.0]]),
    )


# --- in a decoder ---------------------------------------------------------------------------------


def test_bytes_are_codes_and_scales():
    """The mistake: a scale per number, or codes in more than a byte. 256 bytes become 68."""
    sizes = {"layers": 3, "kv_heads": 2, "head_dim": 64, "capacity": 100, "batch": 5}
    before = bytes_alive()
    cache = Int8KeyValueCache(**sizes)
    assert bytes_alive() - before == cache.nbytes == 2 * 3 * 2 * 100 * 5 * (64 + 4)
    assert KeyValueCache(**sizes).nbytes / cache.nbytes == 256 / 68


@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-qwen3"])
def test_logits_are_near_those_of_the_plain_cache(shape):
    """The mistake: a cache that stays plain, whose logits would be equal."""
    decoder = tiny_decoder(shape)
    tokens = torch.randint(0, 128, (2, 40))
    expected = decoder(tokens, decoder.new_cache(batch=2, max_tokens=40))
    apply_int8_cache(decoder)
    cache = decoder.new_cache(batch=2, max_tokens=40)
    assert isinstance(cache, Int8KeyValueCache) and cache.dtype is torch.float32
    got = decoder(tokens, cache)
    error = ((got - expected).norm() / expected.norm()).item()
    assert 0 < error < 0.02


def test_a_token_gets_its_logits_in_any_call():
    """The mistake: the prefill reads its own exact keys, and a verified token differs."""
    decoder = apply_int8_cache(tiny_decoder())
    prompt = torch.randint(0, 128, (30,)).tolist()
    assert row_difference(decoder, prompt) < 1e-5
    text = prompt[:10] * 2
    got = prompt_lookup_generate(decoder, text, new_tokens=30)
    assert got.tokens == greedy(decoder, text, new_tokens=30)


# --- time against position ------------------------------------------------------------------------


def test_a_model_has_no_cache_to_choose():
    """The mistake: an attribute is set on the model, and nothing reads it."""
    with pytest.raises(ValueError, match="cache_class"):
        apply_int8_cache(model_of_shape("tiny-llama", device="cpu"))
