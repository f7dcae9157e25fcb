"""The compiled step of one token: the same answers, from one graph."""

import gc
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from recipes_lib.core.measure.machine import machine
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.decoding import greedy
from recipes_lib.inference import compiled_decode
from recipes_lib.inference.batching import generate_batch
from recipes_lib.inference.compiled_decode import compile_decoder, write_without_a_length
from recipes_lib.inference.decode_loop import apply_decode_loop
from recipes_lib.inference.kv_cache import apply_int8_cache
from recipes_lib.inference.speculative import prompt_lookup_generate
from recipes_lib.precision.int4 import apply_int4
from recipes_lib.precision.int8 import apply_int8

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


@pytest.fixture
def decoder():
    return apply_decode_loop(model_of_shape("tiny-llama", layers=1, device="cpu"))


@pytest.fixture
def graphs_only(monkeypatch):
    """Graphs are made and run operator by operator: enough to count them."""
    monkeypatch.setattr(compiled_decode, "BACKEND", "eager")


def graphs():
    return counters["stats"]["unique_graphs"]


def test_the_idea_writes_one_place_and_hides_the_rest():
    cache = torch.randn(2, 3, 5, 4)
    before = cache.clone()
    new = torch.randn(2, 3, 1, 4)
    written, visible = write_without_a_length(cache, new, torch.tensor([2]))
    assert visible.tolist() == [True, True, True, False, False]
    assert torch.equal(written[:, :, 2:3], new)
    others = [0, 1, 3, 4]
    assert torch.equal(written[:, :, others], before[:, :, others])


def test_compiled_kernels_answer_alike(decoder):
    """The one test that writes kernels: some seconds. They refuse what other backends take."""
    compiled = compile_decoder(decoder, max_tokens=24)
    assert greedy(compiled, PROMPT, new_tokens=8) == greedy(decoder, PROMPT, new_tokens=8)
    prompts = [PROMPT, PROMPT[:4]]
    expected = generate_batch(decoder, prompts, new_tokens=4)
    assert generate_batch(compiled, prompts, new_tokens=4) == expected


def test_one_graph_for_all_tokens_and_all_answers(decoder, graphs_only):
    """A length that is a number of Python would compile again for each token."""
    compiled = compile_decoder(decoder, max_tokens=32)
    before = graphs()
    for prompt in (PROMPT, PROMPT[:2], PROMPT[:1]):
        expected = greedy(decoder, prompt, new_tokens=12)
        assert greedy(compiled, prompt, new_tokens=12) == expected
        # Drafts come as views of one tensor, with strides of their own.
        assert prompt_lookup_generate(compiled, prompt, new_tokens=12).tokens == expected
    assert graphs() - before == 1


# `monkeypatch` would delete the setting: it does not find it in the module's dictionary.
@torch._dynamo.config.patch(recompile_limit=1)
def test_many_compiled_decoders(decoder, graphs_only):
    """PyTorch limits the graphs of one function: each decoder has a limit of its own."""
    for max_tokens in (12, 13, 14):
        compiled = compile_decoder(decoder, max_tokens=max_tokens)
        assert greedy(compiled, PROMPT, new_tokens=2) == greedy(decoder, PROMPT, new_tokens=2)


def test_logits_of_several_tokens(decoder, graphs_only):
    """Prompts run uncompiled, verified tokens one by one: both continue where the last call was."""
    compiled = compile_decoder(decoder, max_tokens=32)
    tokens = torch.tensor([PROMPT])
    expected = decoder(tokens, decoder.new_cache(max_tokens=9))
    cache = compiled.new_cache(max_tokens=9)
    got = [compiled(tokens[:, :4], cache)]
    got += [compiled(tokens[:, 4:7], cache, row_by_row=True)]
    got += [compiled(tokens[:, 7:], cache)]
    torch.testing.assert_close(torch.cat(got, dim=1), expected, atol=1e-5, rtol=1e-5)
    assert cache.length == int(cache.position) == 9
    cache.truncate(4)
    again = compiled(tokens[:, 4:], cache, last_only=True)
    torch.testing.assert_close(again, expected[:, -1:], atol=1e-5, rtol=1e-5)


def test_logits_outlive_the_next_step(decoder, graphs_only):
    """A replay writes to the same address: what was returned before must be a copy."""
    compiled = compile_decoder(decoder, max_tokens=16)
    cache = compiled.new_cache(max_tokens=4)
    first = compiled(torch.tensor([[3]]), cache)
    kept = first.clone()
    compiled(torch.tensor([[7]]), cache)
    assert torch.equal(first, kept)


def test_a_cache_takes_the_memory_of_one_that_is_gone(decoder, graphs_only):
    """A CUDA graph belongs to addresses. Two caches that live at once must not share them."""
    compiled = compile_decoder(decoder, max_tokens=16)
    one = compiled.new_cache(max_tokens=4)
    two = compiled.new_cache(max_tokens=4)
    address = one.keys[0].data_ptr()
    assert two.keys[0].data_ptr() != address
    compiled(torch.tensor([PROMPT[:4]]), one)
    one.values[0][0, 0, 9, 0] = torch.nan
    del one
    gc.collect()
    three = compiled.new_cache(max_tokens=4)
    assert three.keys[0].data_ptr() == address
    assert three.length == int(three.position) == 0
    assert compiled(torch.tensor([[3]]), three).isfinite().all()


# --- what is refused ------------------------------------------------------------------------------


def test_an_int8_cache_is_refused(decoder):
    """Its scales would be lost, and an operator would fail deep inside."""
    with pytest.raises(ValueError, match=r"Int8KeyValueCache.*plain caches"):
        compile_decoder(apply_int8_cache(decoder), max_tokens=8)


def test_places_are_fixed(decoder):
    """The mistake: a token beyond the last place, which a static cache cannot have."""
    compiled = compile_decoder(decoder, max_tokens=8)
    with pytest.raises(ValueError, match=r"max_tokens=9: .* 8 places"):
        greedy(compiled, PROMPT[:5], new_tokens=4)
    cache = compiled.new_cache(max_tokens=8)
    with pytest.raises(ValueError, match="made for 8"):
        compiled(torch.zeros(1, 9, dtype=torch.int64), cache)
    assert cache.length == int(cache.position) == 0


@pytest.mark.gpu
def test_cuda_graphs_answer_alike_and_are_replayed():
    """On a card: the same tokens in fp32, and no new graph for the second answer."""
    model = model_of_shape("tiny-llama", device="cuda")
    decoder = apply_decode_loop(model)
    compiled = compile_decoder(decoder, max_tokens=64)
    expected = greedy(decoder, PROMPT, new_tokens=40)
    assert greedy(compiled, PROMPT, new_tokens=40) == expected
    before = graphs()
    skipped = counters["inductor"]["cudagraph_skips"]
    assert greedy(compiled, PROMPT, new_tokens=40) == expected
    assert graphs() == before
    assert counters["inductor"]["cudagraph_skips"] == skipped == 0


@pytest.mark.gpu
@pytest.mark.skipif(not machine().native_bf16, reason="needs a card with bf16")
@pytest.mark.parametrize("change", [apply_int8, partial(apply_int8, kind="dynamic"), apply_int4])
def test_quantized_layers_are_one_graph_on_gpu(change):
    """In inference mode PyTorch compiles no view of a weight, and whole numbers are transposed."""
    decoder = change(apply_decode_loop(model_of_shape("tiny-llama", device="cuda")))
    compiled = compile_decoder(decoder, max_tokens=32)
    tokens = torch.tensor([PROMPT])
    expected = decoder(tokens, decoder.new_cache(max_tokens=9))
    before = graphs()
    got = compiled(tokens, compiled.new_cache(max_tokens=9), row_by_row=True)
    assert graphs() - before == 1
    assert (got - expected).norm() < 0.05 * expected.norm()
