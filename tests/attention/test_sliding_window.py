import copy
from functools import partial

import pytest
import torch
import transformers

from recipes_lib.attention import sliding_window
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
from recipes_lib.fine_tuning.lora import apply_lora
from tests.conftest import assert_same_gradients, make_batch, run, without_cap


def reads(seq_len, window, sinks=0):
    query = torch.arange(seq_len)[:, None]
    key = torch.arange(seq_len)
    return (key <= query) & ((key > query - window) | (key < sinks))


def dense(q, k, v, *, window, sinks=0, scale=None):
    """The reference: all scores, and a mask [S, S]."""
    groups = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(groups, dim=1)
    v = v.repeat_interleave(groups, dim=1)
    scores = q @ k.transpose(2, 3) * (scale or q.shape[3] ** -0.5)
    allowed = reads(q.shape[2], window, sinks)
    return scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ v


def random_qkv(batch, heads, kv_heads, seq_len, dim, dtype=torch.float32):
    """As a model hands them over: [B, S, H, E] seen as [B, H, S, E]."""
    shapes = [(batch, seq_len, count, dim) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, dtype=dtype).transpose(1, 2).requires_grad_() for shape in shapes]


def with_gradients(attend, qkv):
    out = attend(*qkv)
    torch.manual_seed(1)
    upstream = torch.randn(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, qkv, upstream)]


def assert_near(got, expected, tolerance):
    for value, reference in zip(got, expected):  # with a window of 1, q has no gradient
        scale = max(reference.norm(), expected[0].norm())
        assert (value - reference).norm() <= tolerance * scale


# --- the numbers -----------------------------------------------------------------------------

SHAPES = [  # batch, heads, KV heads, tokens, window, sinks
    (2, 6, 2, 300, 37, 0),  # blocks and a rest
    (1, 4, 4, 370, 50, 0),  # whole blocks only, one head per group
    (2, 3, 1, 120, 100, 0),  # a rest only
    (1, 4, 2, 450, 260, 0),  # C above its lower limit
    (1, 4, 2, 100, 1, 0),  # every token for itself
    (2, 6, 2, 37, 37, 0),  # the window is all
    (2, 6, 2, 5, 37, 3),  # longer than the text
    (2, 6, 2, 300, 37, 5),  # sinks
    (1, 4, 2, 40, 37, 5),  # shorter than window and sinks together
    (1, 4, 2, 430, 100, 130),  # more sinks than window
]


@pytest.mark.parametrize("shape", SHAPES)
def test_equal_to_the_dense_mask(shape):
    *sizes, window, sinks = shape
    qkv = random_qkv(*sizes, 16, torch.float64)
    expected = with_gradients(partial(dense, window=window, sinks=sinks), qkv)
    banded = partial(sliding_window_attention, window=window, sinks=sinks)
    assert_near(with_gradients(banded, qkv), expected, 1e-12)


@pytest.mark.parametrize("sinks", [0, 5])
def test_equal_to_the_plain_one(sinks):
    qkv = random_qkv(2, 6, 2, 110, 8, torch.float64)
    expected = with_gradients(partial(plain_sliding_window, window=20, sinks=sinks), qkv)
    banded = partial(sliding_window_attention, window=20, sinks=sinks)
    assert_near(with_gradients(banded, qkv), expected, 1e-12)


def test_equal_to_the_dense_mask_in_fp32():
    qkv = random_qkv(2, 6, 2, 300, 16)
    expected = with_gradients(partial(dense, window=37, sinks=5), qkv)
    banded = partial(sliding_window_attention, window=37, sinks=5)
    assert_near(with_gradients(banded, qkv), expected, 1e-6)


def test_bf16_is_as_close_as_the_dense_kernel_in_bf16():
    qkv = [x.detach().bfloat16() for x in random_qkv(1, 6, 2, 600, 32)]
    exact_qkv = [x.double().requires_grad_() for x in qkv]
    exact = with_gradients(partial(dense, window=128), exact_qkv)
    qkv = [x.requires_grad_() for x in qkv]
    got = with_gradients(partial(sliding_window_attention, window=128), qkv)
    for value, reference in zip(got, exact):  # one kernel with a dense mask: 4e-3
        assert (value.double() - reference).norm() <= 6e-3 * reference.norm()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_scale_and_the_mask_of_flex():
    # FlexAttention has no backward on a CPU.
    q, k, v = (x.detach() for x in random_qkv(2, 6, 2, 160, 16))
    expected = dense(q, k, v, window=37, sinks=5, scale=0.1)
    got = sliding_window_attention(q, k, v, window=37, sinks=5, scale=0.1)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
    flex = sliding_window._flex(160, 37, 5, q.device, None)(q, k, v, scale=0.1, enable_gqa=True)
    torch.testing.assert_close(flex, expected, atol=1e-6, rtol=1e-5)


# --- the memory ------------------------------------------------------------------------------


def peak(attend, seq_len):
    qkv = random_qkv(1, 4, 2, seq_len, 16)
    with PeakMemory() as memory:
        before = memory.current
        attend(*qkv).sum().backward()
    return memory.peak - before


def test_memory_grows_with_the_sequence_and_not_its_square():
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
    qkv = random_qkv(1, 2, 2, 300, 8)
    banded = partial(sliding_window_attention, window=37)
    with dry_run():
        without_data = [torch.empty(1, 2, 300, 8) for _ in qkv]
        assert banded(*without_data).shape == (1, 2, 300, 8)
    expected = with_gradients(partial(dense, window=37), qkv)
    torch.testing.assert_close(with_gradients(banded, qkv), expected)


def test_saved_for_backward_is_little_more_than_flash_attention_saves():
    """Q, K, V, the output, and one more copy of it for what reads the output."""
    leaves = random_qkv(1, 6, 2, 2048, 16)
    with PeakMemory() as memory:
        before = memory.current
        qkv = [leaf * 1 for leaf in leaves]
        out = sliding_window_attention(*qkv, window=128)
        del qkv
        kept = memory.current - before
    del out
    unit = 2048 * 16 * 4  # bytes of one head
    assert kept < (3 * 6 + 2 * 2) * unit * 1.15


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
        attention = next(module for module in block.modules() if hasattr(module, "is_causal"))
        attention.register_forward_pre_hook(hook_of(window, sinks), with_kwargs=True)
    return twin


def test_models_of_all_families(tiny):
    """One layer of two. Rows are padded on the right, which needs no mask."""
    model = without_cap(tiny)
    batch = make_batch(3, 100)
    expected = run(reference_twin(model, [(100, 0), (20, 0)]), batch)
    assert_same_gradients(run(apply_sliding_window(model, window=20, layers=[1]), batch), expected)
    model.set_attn_implementation("eager")
    # Taken off again: another result.
    assert abs(run(model, batch)["loss"] - expected["loss"]) > 1e-5


def test_all_layers_and_sinks(llama):
    batch = make_batch(2, 100)
    expected = run(reference_twin(llama, [(20, 3), (20, 3)]), batch)
    assert_same_gradients(run(apply_sliding_window(llama, window=20, sinks=3), batch), expected)
    # A second call replaces the first.
    expected = run(reference_twin(llama, [(9, 0), (100, 0)]), batch)
    assert_same_gradients(run(apply_sliding_window(llama, window=9, layers=[0]), batch), expected)


def small(family, **options):
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 128,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config = getattr(transformers, f"{family}Config")(**sizes | options)
    return without_cap(transformers.AutoModelForCausalLM.from_config(config).train())


@pytest.mark.parametrize("family", ["Mistral", "Qwen3"])
def test_equal_to_the_window_of_transformers(family):
    """Mistral has it in all layers, this Qwen3 in the second."""
    options = {}
    layers = None
    if family == "Qwen3":
        options = {"use_sliding_window": True, "max_window_layers": 1}
        layers = [1]
    theirs = small(family, sliding_window=12, **options)
    theirs.set_attn_implementation("eager")
    ours = small(family, sliding_window=None)
    ours.load_state_dict(theirs.state_dict())
    batch = make_batch(2, 90)
    apply_sliding_window(ours, window=12, layers=layers)
    assert_same_gradients(run(ours, batch), run(theirs, batch))


@pytest.mark.parametrize("family", ["Mistral", "Gemma2"])  # this Gemma 2 has it in the first layer
def test_a_models_own_window_is_kept_and_never_widened(family):
    model = small(family, sliding_window=12)
    batch = make_batch(2, 90)
    for wider in ({"window": 13}, {"window": 12, "sinks": 1, "layers": [0]}):
        with pytest.raises(ValueError, match="own 12"):
            apply_sliding_window(model, **wider)
    assert not any(hasattr(module, "reach") for module in model.modules())  # refused, unchanged
    expected = run(reference_twin(model, [(12, 0), (5, 0)]), batch)
    assert_same_gradients(run(apply_sliding_window(model, window=5, layers=[1]), batch), expected)
    expected = run(reference_twin(model, [(4, 0), (4, 0)]), batch)
    assert_same_gradients(run(apply_sliding_window(model, window=4), batch), expected)


def test_autocast_adapters_and_deep_copies(llama):
    model = apply_lora(llama)
    batch = make_batch(2, 100)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    expected = run(reference_twin(model, [(20, 0)] * 2), batch)
    twin = copy.deepcopy(apply_sliding_window(model, window=20))
    assert_same_gradients(run(twin, batch), expected)
    with torch.autocast("cpu", torch.bfloat16):
        got = run(twin, batch)
    for name, value in expected.items():
        assert (got[name] - value).norm() < 0.03 * value.norm(), name


CACHES = [  # model, its own window, sinks
    ("tiny-llama", None, 3),
    ("tiny-gpt2", None, 0),
    ("tiny-mistral", 30, 0),  # with a window of its own, a model's cache forgets
    ("tiny-mistral", None, 3),
    ("tiny-gemma2", 30, 0),
    ("tiny-gemma2", 30, 3),  # its first layer has the window: no sinks there
]


@pytest.mark.parametrize(("name", "own_window", "sinks"), CACHES)
def test_the_cache_gives_what_the_whole_row_gives(name, own_window, sinks):
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


def test_saved_models_do_not_name_the_window(llama, tmp_path):
    llama.save_pretrained(tmp_path)
    before = (tmp_path / "config.json").read_text()
    apply_sliding_window(llama, window=5).save_pretrained(tmp_path)
    assert (tmp_path / "config.json").read_text() == before
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    batch = make_batch()
    expected = llama(**batch).loss
    # Full attention again, as the docstring says.
    assert loaded.config._attn_implementation == "sdpa"
    assert not torch.equal(loaded(**batch).loss, expected)
    torch.testing.assert_close(apply_sliding_window(loaded, window=5)(**batch).loss, expected)


# --- what is refused -------------------------------------------------------------------------


def test_models_that_cannot_have_it_are_refused(llama):
    for options, message in [
        ({"window": 0}, "window=0"),
        ({"window": 64.0}, "whole number"),
        ({"window": 4, "sinks": -1}, "sinks=-1"),
        ({"window": 4, "layers": [0, 2]}, r"layers=\[0, 2\]: give indices from 0 to 1"),
        ({"window": 4, "layers": []}, "give indices"),
    ]:
        with pytest.raises(ValueError, match=message):
            apply_sliding_window(llama, **options)
    llama.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(ValueError, match="every block needs one attention"):
        apply_sliding_window(llama, window=4)
    assert llama.config._attn_implementation == "sdpa"


def test_capped_scores_are_refused():
    """SDPA would leave the cap out."""
    gemma = model_of_shape("tiny-gemma2", device="cpu")
    with pytest.raises(ValueError, match="attn_logit_softcapping=50"):
        apply_sliding_window(gemma, window=4)
    gemma.config.attn_logit_softcapping = None  # the attention modules still cap
    with pytest.raises(ValueError, match="no softcap"):
        apply_sliding_window(gemma, window=4)(**make_batch())


def test_packed_rows_are_refused(llama, batch):
    model = apply_sliding_window(llama, window=4)
    packed = {
        "input_ids": batch["input_ids"],
        "position_ids": torch.arange(23).remainder(9).expand(4, -1),
    }
    with pytest.raises(ValueError, match="give one text per row, padded on the right"):
        model(**packed, use_cache=False)
    everyone = {"attention_mask": torch.ones_like(batch["input_ids"])}
    # Of these transformers sees nothing.
    for options in ({}, everyone, everyone | {"use_cache": False}):
        with pytest.raises(ValueError, match="positions restart, as in packed rows"):
            model(**packed, **options)


def test_batches_that_it_cannot_take_are_refused(llama, batch):
    model = apply_sliding_window(llama, window=4)
    left = {name: tensor.flip(1) for name, tensor in batch.items()}
    with pytest.raises(ValueError, match="give one text per row, padded on the right"):
        model(**left, use_cache=False)
    square = {"input_ids": batch["input_ids"], "attention_mask": torch.zeros(4, 1, 23, 23)}
    with pytest.raises(ValueError, match="no a mask"):
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


def test_tensors_that_do_not_fit_are_refused():
    q, k, v = random_qkv(1, 6, 2, 9, 8)
    for wrong in [(q[:, :5], k, v), (q[:, :, :8], k, v), (q, k[:, :1], v), (q[0], k[0], v[0])]:
        with pytest.raises(ValueError, match=r"give \[B, H, S, E\]"):
            sliding_window_attention(*wrong, window=3)
    with pytest.raises(ValueError, match="choose auto, banded or, on CUDA, flex"):
        sliding_window_attention(q, k, v, window=3, kernel="flex")
    with pytest.raises(ValueError, match="window=0"):
        predicted_speedup(seq_len=8, window=0)


# --- the arithmetic --------------------------------------------------------------------------


@pytest.mark.parametrize(("seq_len", "window"), [(2000, 100), (4000, 512), (300, 400)])
def test_the_prediction_counts_the_scores(monkeypatch, seq_len, window):
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


def test_the_prediction_in_the_limit():
    in_the_limit = 2**20 / (2.5 * 512)
    assert predicted_speedup(seq_len=2**20, window=512) == pytest.approx(in_the_limit, rel=0.01)
    assert predicted_speedup(seq_len=100, window=100) == 1


# --- on a GPU --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["auto", "flex", "banded"])
@pytest.mark.parametrize("sinks", [0, 5])
def test_equal_to_the_dense_mask_on_gpu(kernel, sinks):
    qkv = [x.detach().bfloat16() for x in random_qkv(2, 6, 2, 1111, 64)]
    exact_qkv = [x.double().requires_grad_() for x in qkv]
    exact = with_gradients(partial(dense, window=200, sinks=sinks), exact_qkv)
    qkv = [x.cuda().requires_grad_() for x in qkv]
    out = sliding_window_attention(*qkv, window=200, sinks=sinks, kernel=kernel)
    torch.manual_seed(1)
    upstream = torch.randn(out.shape).bfloat16().cuda()
    for value, reference in zip([out, *torch.autograd.grad(out, qkv, upstream)], exact):
        assert (value.cpu().double() - reference).norm() <= 1e-2 * reference.norm()


@pytest.mark.gpu
def test_a_model_under_autocast_on_gpu(llama):
    """Rotary embeddings leave q and k in fp32 beside v in bf16, which FlexAttention refuses."""
    batch = make_batch(2, 300)
    expected = run(reference_twin(llama, [(40, 0)] * 2), batch)
    apply_sliding_window(llama.cuda(), window=40)
    with torch.autocast("cuda", torch.bfloat16):
        got = run(llama, {name: tensor.cuda() for name, tensor in batch.items()})
    for name, value in expected.items():
        assert (got[name].cpu() - value).norm() < 0.03 * value.norm(), name
