import pytest
import torch

from recipes_lib.core.measure import PeakMemory, bytes_alive
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.decoding import greedy
from recipes_lib.inference.batching import generate_batch
from recipes_lib.inference.decode_loop import apply_decode_loop
from recipes_lib.inference.kv_cache import (
    SCALE_BYTES,
    Int8KeyValueCache,
    apply_int8_cache,
    dequantized,
    predicted_cache_bytes,
    quantized,
    relative_error,
    remove_int8_cache,
)
from recipes_lib.inference.kv_cache import positions as kv_cache_positions
from recipes_lib.inference.speculative import prompt_lookup_generate, row_difference

SIZES = {"layers": 2, "kv_heads": 3, "head_dim": 16}


def tiny_decoder(shape="tiny-llama"):
    return apply_decode_loop(model_of_shape(shape, device="cpu"))


# --- what is stored -------------------------------------------------------------------------------


def test_codes_and_scales_by_hand():
    """Each token and head has its own scale: a large token must not round a small one to zero."""
    x = torch.tensor([[127.0, -63.6, 0.4], [0.0127, 0.01, 0.0], [0.0, 0.0, 0.0]])
    codes, scale = quantized(x)
    assert codes.tolist() == [[127, -64, 0], [127, 100, 0], [0, 0, 0]]
    torch.testing.assert_close(scale, torch.tensor([[1.0], [0.0001], [0.0]]))
    torch.testing.assert_close(
        dequantized(codes, scale, torch.float32)[:2],
        torch.tensor([[127.0, -64.0, 0.0], [0.0127, 0.01, 0.0]]),
    )


def test_error_is_that_of_rounding():
    """Steps of scale: the error is scale / sqrt(12) for numbers that fall anywhere between."""
    x = torch.randn(3, 4, 200, 64)
    step = x.abs().amax(-1, keepdim=True) / 127
    expected = (step.square().mean() / 12).sqrt() / x.square().mean().sqrt()
    assert relative_error(x) == pytest.approx(expected.item(), rel=0.02)
    assert relative_error(x) < 0.01


def test_append_and_truncate_as_the_plain_cache():
    """Tokens in several calls, some forgotten and written again, for two rows."""
    cache = Int8KeyValueCache(**SIZES, capacity=11, batch=2)
    k, v = torch.randn(2, 2, 3, 11, 16)
    for begin, end in [(0, 5), (5, 6), (6, 11)]:
        for layer in range(2):
            keys, values = cache.append(layer, k[:, :, begin:end], v[:, :, begin:end] * (layer + 1))
            for got, whole in ((keys, k), (values, v * (layer + 1))):
                expected = dequantized(*quantized(whole[:, :, :end]), torch.float32)
                assert torch.equal(got, expected)
        cache.advance(end - begin)
    cache.truncate(4)
    keys, _ = cache.append(0, k[:, :, :2], v[:, :, :2])
    again = torch.cat([k[:, :, :4], k[:, :, :2]], dim=2)
    assert torch.equal(keys, dequantized(*quantized(again), torch.float32))
    with pytest.raises(ValueError, match="was made for 11"):
        cache.reserve(8)


def test_bytes_exactly_as_predicted():
    sizes = SIZES | {"tokens": 100, "batch": 5}
    before = bytes_alive()
    cache = Int8KeyValueCache(**SIZES, capacity=100, batch=5)
    predicted = predicted_cache_bytes(**sizes, bytes_per_number=1, scale_bytes=SCALE_BYTES)
    assert bytes_alive() - before == cache.nbytes == predicted
    decoder = tiny_decoder()
    plain = decoder.new_cache(max_tokens=100, batch=5)
    tiny = {"layers": 2, "kv_heads": 2, "head_dim": 16, "tokens": 100, "batch": 5}
    assert plain.nbytes == predicted_cache_bytes(**tiny)
    # At the head dimension of Llama and SmolLM2: 256 bytes become 68.
    wide = {"layers": 30, "kv_heads": 3, "head_dim": 64, "tokens": 512}
    small = predicted_cache_bytes(**wide, bytes_per_number=1, scale_bytes=SCALE_BYTES)
    assert predicted_cache_bytes(**wide) / small == 256 / 68


# --- in a decoder ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-qwen3"])
def test_logits_are_near_those_of_the_plain_cache(shape):
    """And they are not equal: a cache that stays plain would pass otherwise."""
    decoder = tiny_decoder(shape)
    tokens = torch.randint(0, 128, (2, 40))
    expected = decoder(tokens, decoder.new_cache(batch=2, max_tokens=40))
    apply_int8_cache(decoder)
    cache = decoder.new_cache(batch=2, max_tokens=40)
    assert isinstance(cache, Int8KeyValueCache) and cache.dtype is torch.float32
    got = decoder(tokens, cache)
    error = ((got - expected).norm() / expected.norm()).item()
    assert 0 < error < 0.02
    remove_int8_cache(decoder)
    again = decoder(tokens, decoder.new_cache(batch=2, max_tokens=40))
    assert torch.equal(again, expected)


def test_a_new_cache_is_all_that_is_allocated():
    """The mistake: a plain cache that tells the sizes, of three times the bytes and more.

    One row, and several: a plain cache for one row would hide among those of ten.
    """
    decoder = apply_int8_cache(tiny_decoder())
    for batch in (1, 10):
        decoder.new_cache(max_tokens=500)  # makes the table of angles
        with PeakMemory() as memory:
            before = memory.current
            cache = decoder.new_cache(batch=batch, max_tokens=500)
            assert memory.peak - before == cache.nbytes
        del cache


def test_a_token_gets_its_logits_in_any_call():
    """Were the prefill to read its own exact keys, a verified token would differ from a single."""
    decoder = apply_int8_cache(tiny_decoder())
    prompt = torch.randint(0, 128, (30,)).tolist()
    for row_by_row in (True, False):
        assert row_difference(decoder, prompt, row_by_row=row_by_row) < 1e-5
    text = prompt[:10] * 2
    got = prompt_lookup_generate(decoder, text, new_tokens=30)
    assert got.tokens == greedy(decoder, text, new_tokens=30)


def test_left_padding_as_the_plain_cache():
    decoder = apply_int8_cache(tiny_decoder())
    prompts = [torch.randint(0, 128, (length,)).tolist() for length in (3, 11, 1)]
    single = [greedy(decoder, prompt, new_tokens=16) for prompt in prompts]
    assert generate_batch(decoder, prompts, new_tokens=16) == single


def test_bad_input():
    decoder = apply_int8_cache(tiny_decoder())
    with pytest.raises(ValueError, match="already"):
        apply_int8_cache(decoder)
    model = model_of_shape("tiny-llama", device="cpu")
    for function in (apply_int8_cache, remove_int8_cache):
        with pytest.raises(ValueError, match="cache_class, such as apply_decode_loop"):
            function(model)
    with pytest.raises(ValueError, match="no int8 caches"):
        remove_int8_cache(tiny_decoder())
    with pytest.raises(ValueError, match="max_tokens=0"):
        decoder.new_cache(max_tokens=0)
    with pytest.raises(ValueError, match="bytes_per_number=None"):
        predicted_cache_bytes(layers=1, kv_heads=1, head_dim=1, tokens=1, bytes_per_number=None)
    for x in (None, torch.zeros(3)):  # of zeros, the error would be no number
        with pytest.raises(ValueError, match="give keys or values"):
            relative_error(x)


# --- time against position ------------------------------------------------------------------------


def test_time_by_position(monkeypatch):
    """With a cache a step computes one token behind the others, without one the whole text."""
    calls = []

    def count_instead_of_seconds(steps, *, rounds):
        computed = {}
        for name, step in reversed(steps.items()):
            calls.clear()
            step()
            computed[name] = calls * rounds
        return computed

    def note(module, args, result):
        tokens, cache = args
        calls.append(100 * cache.length + tokens.shape[1])

    monkeypatch.setattr(kv_cache_positions, "in_turns", count_instead_of_seconds)
    decoder = tiny_decoder()
    decoder.register_forward_hook(note)
    early, late = kv_cache_positions.time_by_position(decoder, [3, 50])
    # After the call the cache holds position + 1 tokens.
    assert (early.position, early.with_cache, early.without_cache) == (3, 401, 404)
    assert (late.position, late.with_cache, late.without_cache) == (50, 5101, 5151)
    with pytest.raises(ValueError, match="at least one"):
        kv_cache_positions.time_by_position(decoder, [])
    with pytest.raises(ValueError, match="positions=5: give a list"):
        kv_cache_positions.time_by_position(decoder, 5)
    with pytest.raises(ValueError, match="NoneType is no decoder"):
        kv_cache_positions.time_by_position(None, [5])


@pytest.mark.gpu
def test_on_gpu():
    """In bf16 a cache takes 2 bytes per number, and attention reads bf16."""
    decoder = apply_decode_loop(model_of_shape("tiny-llama").bfloat16())
    plain = decoder.new_cache(max_tokens=64).nbytes
    apply_int8_cache(decoder)
    cache = decoder.new_cache(max_tokens=64)
    assert cache.dtype is torch.bfloat16 and plain / cache.nbytes == 32 / 20
    prompts = [[1, 2, 3], [4] * 11]
    single = [greedy(decoder, prompt, new_tokens=8) for prompt in prompts]
    assert generate_batch(decoder, prompts, new_tokens=8) == single
