"""A window equals a dense mask, is kept by caches, and refuses what it cannot see."""

import copy
from functools import partial

import pytest
import torch
import transformers

from recipes_lib.attention import _compiled_flex, sliding_window
from recipes_lib.attention.sliding_window import (
    apply_sliding_window,
    plain_sliding_window,
    predicted_speedup,
    sliding_window_attention,
)
from recipes_lib.attention.sliding_window import banded as sliding_window_banded
from recipes_lib.core.measure import PeakMemory, dry_run
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.causal_lm import decoder_blocks
from tests.attention.qkv import attention_under, random_qkv, with_gradients
from tests.conftest import assert_same_gradients, make_batch, run, without_cap
from tests.small_models import small_model


def reads(seq_len, window, sinks=0):
    query = torch.arange(seq_len)[:, None]
    key = torch.arange(seq_len)
    return (key <= query) & ((key > query - window) | (key < sinks))


def dense(q, k, v, *, window, sinks=0, scale=None):
    return attention_under(reads(q.shape[2], window, sinks), q, k, v, scale=scale)


def assert_near(got, expected, tolerance):
    for value, reference in zip(got, expected):  # with a window of 1, q has no gradient
        scale = max(reference.norm(), expected[0].norm())
        assert (value - reference).norm() <= tolerance * scale


# --- the numbers -----------------------------------------------------------------------------

SHAPES = [  # batch, heads, KV heads, tokens, window, sinks
    (1, 4, 4, 370, 50, 0),  # whole blocks only, one head per group
    (2, 3, 1, 120, 100, 0),  # a rest only
    (1, 4, 2, 450, 260, 0),  # C above its lower limit
    (1, 4, 2, 100, 1, 0),  # every token for itself
    (2, 6, 2, 5, 37, 3),  # longer than the text
    (2, 6, 2, 300, 37, 5),  # blocks, a rest and sinks
    (1, 4, 2, 430, 100, 130),  # more sinks than window
]


@pytest.mark.parametrize("shape", SHAPES)
def test_equal_to_the_loop_over_queries(shape):
    """A block that begins or ends one key too far."""
    *sizes, window, sinks = shape
    qkv = random_qkv(*sizes, 16, torch.float64)
    expected = with_gradients(partial(plain_sliding_window, window=window, sinks=sinks), qkv)
    banded = partial(sliding_window_attention, window=window, sinks=sinks)
    assert_near(with_gradients(banded, qkv), expected, 1e-12)


def test_bf16_is_as_close_as_the_dense_kernel_in_bf16():
    """Sums over overlapping windows that are made in 16 bits."""
    qkv = [x.detach().bfloat16() for x in random_qkv(1, 6, 2, 600, 32)]
    exact_qkv = [x.double().requires_grad_() for x in qkv]
    exact = with_gradients(partial(dense, window=128), exact_qkv)
    qkv = [x.requires_grad_() for x in qkv]
    got = with_gradients(partial(sliding_window_attention, window=128), qkv)
    for value, reference in zip(got, exact):  # one kernel with a dense mask: 4e-3
        assert (value.double() - reference).norm() <= 6e-3 * reference.norm()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_scale_and_the_mask_of_flex(monkeypatch):
    """The rule of the other kernel is written a second time."""
    # FlexAttention has no backward on a CPU.
    monkeypatch.setattr(_compiled_flex, "_compiled_by", lambda function, backend: function)
    q, k, v = (x.detach() for x in random_qkv(2, 6, 2, 160, 16))
    expected = dense(q, k, v, window=37, sinks=5, scale=0.1)
    got = sliding_window_attention(q, k, v, window=37, sinks=5, scale=0.1)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
    flex = sliding_window._window_by_flex(160, 37, 5, q.device, None)(
        q, k, v, scale=0.1, enable_gqa=True
    )
    torch.testing.assert_close(flex, expected, atol=1e-6, rtol=1e-5)


# --- the memory ------------------------------------------------------------------------------


def peak(attend, seq_len):
    qkv = random_qkv(1, 4, 2, seq_len, 16)
    with PeakMemory() as memory:
        before = memory.current
        attend(*qkv).sum().backward()
    return memory.peak - before


def test_memory_grows_with_the_sequence_and_not_its_square():
    """Copies of K and V for every block, or a mask [S, S]."""
    banded = partial(sliding_window_attention, window=64)
    masked = partial(dense, window=64)
    short = peak(banded, 512)
    long = peak(banded, 1024)
    assert long < 2.5 * short
    short_masked = peak(masked, 512)
    long_masked = peak(masked, 1024)
    assert long_masked > 3.8 * short_masked
    assert long < long_masked / 10


def test_a_dry_run_leaves_no_mask_without_data():
    """The mask is kept for the next step, which would read what has no values."""
    qkv = random_qkv(1, 2, 2, 300, 8)
    banded = partial(sliding_window_attention, window=37)
    with dry_run():
        without_data = [torch.empty(1, 2, 300, 8) for _ in qkv]
        assert banded(*without_data).shape == (1, 2, 300, 8)
    expected = with_gradients(partial(dense, window=37), qkv)
    torch.testing.assert_close(with_gradients(banded, qkv), expected)


# --- in a model ------------------------------------------------------------------------------


def reference_twin(model, reach):
    """Eager attention under a dense mask of its own in every layer, of window and sinks `reach`."""
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")

    def hook_of(window, sinks):
        def dense_mask(module, args, options):
            hidden = options["hidden_states"] if "hidden_states" in options else args[0]
            allowed = reads(hidden.shape[1], window, sinks)
            bias = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
            return args, options | {"attention_mask": bias[None, None]}

        return dense_mask

    for block, (window, sinks) in zip(decoder_blocks(twin), reach):
        for attention in block.modules():
            if hasattr(attention, "is_causal"):
                attention.register_forward_pre_hook(hook_of(window, sinks), with_kwargs=True)
    return twin


def test_one_layer_of_two():
    """Rows are padded on the right, which needs no mask. A second call replaces the first."""
    model = model_of_shape("tiny-gpt2", device="cpu")
    batch = make_batch(3, 100)
    apply_sliding_window(model, window=7, sinks=3)
    expected = run(reference_twin(model, [(100, 0), (20, 0)]), batch)
    assert_same_gradients(run(apply_sliding_window(model, window=20, layers=[1]), batch), expected)
    model.set_attn_implementation("eager")
    # Taken off again: another result.
    assert abs(run(model, batch)["loss"] - expected["loss"]) > 1e-5


def test_all_layers_and_sinks(llama):
    batch = make_batch(2, 100)
    expected = run(reference_twin(llama, [(20, 3), (20, 3)]), batch)
    twin = copy.deepcopy(apply_sliding_window(llama, window=20, sinks=3))
    assert_same_gradients(run(twin, batch), expected)
    with torch.autocast("cpu", torch.bfloat16):
        got = run(twin, batch)
    for name, value in expected.items():
        assert (got[name] - value).norm() < 0.03 * value.norm(), name


GROUPED = {"num_key_value_heads": 2, "head_dim": 16}


def test_a_models_own_window_is_kept_and_never_widened():
    """The numbers of transformers' window, which this Gemma 2 has in its first layer."""
    model = without_cap(small_model("Gemma2", sliding_window=12, **GROUPED))
    batch = make_batch(2, 90)
    for wider in ({"window": 13}, {"window": 12, "sinks": 1, "layers": [0]}):
        with pytest.raises(ValueError, match="own 12"):
            apply_sliding_window(model, **wider)
    assert not any(hasattr(module, "reach") for module in model.modules())  # refused, unchanged
    theirs = copy.deepcopy(model)
    theirs.set_attn_implementation("eager")
    apply_sliding_window(model, window=12, layers=[0])
    assert_same_gradients(run(model, batch), run(theirs, batch))
    expected = run(reference_twin(model, [(12, 0), (5, 0)]), batch)
    assert_same_gradients(run(apply_sliding_window(model, window=5, layers=[1]), batch), expected)


CACHES = [  # model, its own window, sinks
    ("tiny-llama", None, 3),
    ("tiny-gemma2", 30, 3),  # its first layer has a window, and its cache forgets: no sinks there
]


@pytest.mark.parametrize(("name", "own_window", "sinks"), CACHES)
def test_the_cache_gives_what_the_whole_row_gives(name, own_window, sinks):
    """The first of several new tokens reads too far, or a cache has forgotten the sinks."""
    model = without_cap(model_of_shape(name, device="cpu")).eval()
    for part in (model.config, *model.modules()):
        if getattr(part, "sliding_window", None):
            part.sliding_window = own_window
    layers = [1] if name == "tiny-gemma2" else None
    apply_sliding_window(model, window=20, sinks=sinks, layers=layers)
    ids = torch.randint(1, 128, (2, 110))
    parts = [(80, 95), *((at, at + 1) for at in range(95, 110))]
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        first = model(ids[:, :80], use_cache=True)
        cache = first.past_key_values
        logits = [first.logits]
        for start, end in parts:
            out = model(ids[:, start:end], past_key_values=cache, use_cache=True)
            logits.append(out.logits)
    torch.testing.assert_close(torch.cat(logits, 1), expected, atol=1e-5, rtol=1e-5)
    generated = model.generate(ids[:, :50], max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert torch.equal(generated[:, 50], expected[:, 49].argmax(-1))


def test_a_saved_model_has_full_attention_again(llama, tmp_path):
    """And one whose configuration alone was copied says so, before it trains without a window."""
    apply_sliding_window(llama, window=5).save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    copied = transformers.LlamaForCausalLM(llama.config)
    with pytest.raises(ValueError, match="and no window"):
        copied(**make_batch())


# --- what is refused -------------------------------------------------------------------------


def test_masks_that_few_tokens_do_not_show_are_refused(llama):
    """Chunks of 8,192 tokens, and keys that an indexer selects from 2,048 on."""
    llama.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(ValueError, match="chunked_attention, which has a mask of its own"):
        apply_sliding_window(llama, window=4)
    with torch.device("meta"):
        model = small_model("DeepseekV32", q_lora_rank=16)
    with pytest.raises(ValueError, match="indexed_attention"):
        apply_sliding_window(model, window=4)


def test_capped_scores_are_refused():
    """SDPA would leave the cap out."""
    gemma = model_of_shape("tiny-gemma2", device="cpu")
    with pytest.raises(ValueError, match="attn_logit_softcapping=50"):
        apply_sliding_window(gemma, window=4)
    gemma.config.attn_logit_softcapping = None  # the attention modules still cap
    with pytest.raises(ValueError, match="no softcap"):
        apply_sliding_window(gemma, window=4)(**make_batch())


def test_packed_rows_are_refused(llama, batch):
    """transformers looks for them only where there is neither a mask nor a cache."""
    model = apply_sliding_window(llama, window=4)
    packed = {
        "input_ids": batch["input_ids"],
        "position_ids": torch.arange(23).remainder(9).expand(4, -1),
    }
    everyone = {"attention_mask": torch.ones_like(batch["input_ids"])}
    for options in ({}, {"use_cache": False}, everyone, everyone | {"use_cache": False}):
        with pytest.raises(ValueError, match="give one document per row"):
            model(**packed, **options)


def test_batches_that_it_cannot_take_are_refused(llama, batch):
    """SDPA has no argument for them, and would leave each out in silence."""
    model = apply_sliding_window(llama, window=4)
    left = {name: tensor.flip(1) for name, tensor in batch.items()}
    with pytest.raises(ValueError, match="give one text per row, padded on the right"):
        model(**left, use_cache=False)
    square = {"input_ids": batch["input_ids"], "attention_mask": torch.zeros(4, 1, 23, 23)}
    with pytest.raises(ValueError, match="takes no mask"):
        model(**square, use_cache=False)
    with pytest.raises(ValueError, match="no output_attentions"):
        model(**batch, output_attentions=True)
    static = transformers.StaticCache(config=model.config, max_cache_len=30)
    with pytest.raises(ValueError, match="static cache"):
        model(batch["input_ids"], past_key_values=static)
    for block in decoder_blocks(model):
        block.self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match="no dropout"):
        model(**batch)
    assert model.eval()(**batch).loss > 0


# --- the arithmetic --------------------------------------------------------------------------


@pytest.mark.parametrize(("seq_len", "window"), [(2000, 100), (300, 400)])
def test_the_prediction_counts_the_scores(monkeypatch, seq_len, window):
    """The formula has the blocks of another kernel."""
    counted = []
    real = torch.nn.functional.scaled_dot_product_attention

    def spy(q, k, *args, is_causal=False, **options):
        scores = q.shape[:-1].numel() * k.shape[2]
        counted.append(scores / 2 if is_causal else scores)
        return real(q, k, *args, is_causal=is_causal, **options)

    monkeypatch.setattr(sliding_window_banded.F, "scaled_dot_product_attention", spy)
    sliding_window_attention(*random_qkv(1, 2, 1, seq_len, 8), window=window)
    speedup = 2 * seq_len**2 / 2 / sum(counted)  # two heads
    predicted = predicted_speedup(seq_len=seq_len, window=window)
    assert predicted == pytest.approx(speedup, rel=0.001)


# --- on a GPU --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("flex", "sinks"), [(True, 5), (False, 0)])
def test_equal_to_the_dense_mask_on_gpu(flex, sinks, monkeypatch):
    """Only a GPU runs the compiled kernel and its backward."""
    monkeypatch.setattr(sliding_window, "_flex_is_fast", lambda device: flex)
    qkv = [x.detach().bfloat16() for x in random_qkv(2, 6, 2, 1111, 64)]
    exact_qkv = [x.double().requires_grad_() for x in qkv]
    exact = with_gradients(partial(dense, window=200, sinks=sinks), exact_qkv)
    qkv = [x.cuda().requires_grad_() for x in qkv]
    got = with_gradients(sliding_window_attention, qkv, window=200, sinks=sinks)
    for value, reference in zip(got, exact):
        assert (value.cpu().double() - reference).norm() <= 1e-2 * reference.norm()
