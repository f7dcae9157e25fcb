import copy

import pytest
import torch
import transformers

from recipes_lib.attention import sliding_window
from recipes_lib.attention.sliding_window import (
    apply_sliding_window,
    estimate_sliding_window,
    sliding_window_attention,
)
from recipes_lib.core.causal_lm import decoder_blocks
from recipes_lib.core.measure import PeakMemory, dry_run
from recipes_lib.core.model import model_of_shape
from recipes_lib.fine_tuning.lora import apply_lora
from tests.conftest import assert_same_gradients, make_batch, run, without_cap


def reads(seq_len, window, sinks=0):
    query, key = torch.arange(seq_len)[:, None], torch.arange(seq_len)
    return (key <= query) & ((key > query - window) | (key < sinks))


def dense(q, k, v, window, sinks=0, scale=None):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (scale or q.shape[3] ** -0.5)
    return scores.masked_fill(~reads(q.shape[2], window, sinks), float("-inf")).softmax(-1) @ v


def random_qkv(batch, heads, kv_heads, seq_len, dim, dtype=torch.float32):
    """As a model hands them over: [B, S, H, E] seen as [B, H, S, E]."""
    shapes = [(batch, seq_len, count, dim) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, dtype=dtype).transpose(1, 2).requires_grad_() for shape in shapes]


def with_gradients(attend, qkv):
    out = attend(*qkv)
    torch.manual_seed(1)
    return [out.detach(), *torch.autograd.grad(out, qkv, torch.randn(out.shape).to(out.dtype))]


SHAPES = [  # batch, heads, KV heads, tokens, window, sinks
    (2, 6, 2, 300, 37, 0),  # blocks and a rest
    (1, 4, 4, 370, 50, 0),  # whole blocks only, one head per group
    (2, 3, 1, 120, 100, 0),  # a rest only
    (1, 4, 2, 450, 260, 0),  # C above its lower limit
    (1, 4, 2, 100, 1, 0),  # every token for itself
    (2, 6, 2, 37, 37, 0),  # the window is all
    (2, 6, 2, 5, 37, 3),
    (2, 6, 2, 300, 37, 5),  # sinks
    (1, 4, 2, 40, 37, 5),  # shorter than window and sinks together
    (1, 4, 2, 430, 100, 130),  # more sinks than window
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equal_to_the_dense_mask(shape, dtype):
    *sizes, window, sinks = shape
    qkv = random_qkv(*sizes, 16, dtype)
    expected = with_gradients(lambda *x: dense(*x, window, sinks), qkv)
    got = with_gradients(lambda *x: sliding_window_attention(*x, window=window, sinks=sinks), qkv)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    for value, reference in zip(got, expected):  # with a window of 1, q has no gradient
        assert (value - reference).norm() <= tolerance * max(reference.norm(), expected[0].norm())


def test_bf16_is_as_close_as_the_dense_kernel_in_bf16():
    qkv = [x.detach().bfloat16() for x in random_qkv(1, 6, 2, 600, 32)]
    exact = with_gradients(lambda *x: dense(*x, 128), [x.double().requires_grad_() for x in qkv])
    qkv = [x.requires_grad_() for x in qkv]
    got = with_gradients(lambda *x: sliding_window_attention(*x, window=128), qkv)
    for value, reference in zip(got, exact):
        assert (
            value.double() - reference
        ).norm() <= 6e-3 * reference.norm()  # one kernel with a dense mask: 4e-3


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_scale_and_the_mask_of_flex():
    q, k, v = (
        x.detach() for x in random_qkv(2, 6, 2, 160, 16)
    )  # FlexAttention has no backward on a CPU
    expected = dense(q, k, v, 37, 5, scale=0.1)
    got = sliding_window_attention(q, k, v, window=37, sinks=5, scale=0.1)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
    flex = sliding_window._flex(160, 37, 5, q.device, None)(q, k, v, scale=0.1, enable_gqa=True)
    torch.testing.assert_close(flex, expected, atol=1e-6, rtol=1e-5)


def test_memory_grows_with_the_sequence_and_not_its_square():
    def peak(attend, seq_len):
        qkv = random_qkv(1, 4, 2, seq_len, 16)
        with PeakMemory() as memory:
            before = memory.current
            attend(*qkv).sum().backward()
        return memory.peak - before

    banded = [
        peak(lambda *x: sliding_window_attention(*x, window=64), seq_len) for seq_len in (512, 1024)
    ]
    masked = [peak(lambda *x: dense(*x, 128), seq_len) for seq_len in (512, 1024)]
    assert banded[1] < 2.5 * banded[0]
    assert masked[1] > 3.8 * masked[0] and banded[1] < masked[1] / 10


def test_a_dry_run_leaves_no_mask_without_data():
    qkv = random_qkv(1, 2, 2, 300, 8)
    with dry_run():
        without_data = [torch.empty(1, 2, 300, 8) for _ in qkv]
        assert sliding_window_attention(*without_data, window=37).shape == (1, 2, 300, 8)
    expected = with_gradients(lambda *x: dense(*x, 37), qkv)
    torch.testing.assert_close(
        with_gradients(lambda *x: sliding_window_attention(*x, window=37), qkv), expected
    )


def test_saved_for_backward_is_little_more_than_flash_attention_saves():
    """Q, K, V, the output, and one more copy of it for what reads the output."""
    leaves = random_qkv(1, 6, 2, 2048, 16)
    q, k, v = (x.detach().clone(memory_format=torch.preserve_format) for x in leaves)
    with PeakMemory() as memory:
        before = memory.current
        qkv = [leaf * 1 for leaf in leaves]
        out = sliding_window_attention(*qkv, window=128)
        del qkv
        kept = memory.current - before
    del out, q, k, v
    unit = 2048 * 16 * 4  # bytes of one head
    assert kept < (3 * 6 + 2 * 2) * unit * 1.15


def reference_twin(model, reach):
    """Eager attention under a dense mask of its own in every layer; `reach` holds window and sinks of each."""
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


@pytest.mark.parametrize(
    ("seq_len", "options"), [(23, {"window": 7}), (150, {"window": 20, "layers": [1]})]
)
def test_models_of_all_families(tiny, seq_len, options):
    """Rows are padded on the right, which needs no mask."""
    model, batch = without_cap(tiny), make_batch(3, seq_len)
    local = options.get("layers", [0, 1])
    reach = [(options["window"] if layer in local else seq_len, 0) for layer in (0, 1)]
    expected = run(reference_twin(model, reach), batch)
    assert_same_gradients(run(apply_sliding_window(model, **options), batch), expected)
    model.set_attn_implementation("eager")
    assert (
        abs(run(model, batch)["loss"] - expected["loss"]) > 1e-5
    )  # taken off again: another result


def test_sinks_in_a_model(llama):
    batch = make_batch(2, 130)
    expected = run(reference_twin(llama, [(20, 3), (20, 3)]), batch)
    assert_same_gradients(run(apply_sliding_window(llama, window=20, sinks=3), batch), expected)
    expected = run(
        reference_twin(llama, [(9, 0), (130, 0)]), batch
    )  # a second call replaces the first
    assert_same_gradients(run(apply_sliding_window(llama, window=9, layers=[0]), batch), expected)


def small(family, **options):
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 128}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = getattr(transformers, f"{family}Config")(**sizes, **ids, **options)
    return without_cap(transformers.AutoModelForCausalLM.from_config(config).train())


@pytest.mark.parametrize("family", ["Mistral", "Qwen3"])
def test_equal_to_the_window_of_transformers(family):
    """Mistral has it in all layers, this Qwen3 in the second."""
    options = {"use_sliding_window": True, "max_window_layers": 1} if family == "Qwen3" else {}
    theirs = small(family, sliding_window=12, **options)
    theirs.set_attn_implementation("eager")
    ours = small(family, sliding_window=None)
    ours.load_state_dict(theirs.state_dict())
    batch = make_batch(2, 90)
    apply_sliding_window(ours, window=12, layers=[1] if options else None)
    assert_same_gradients(run(ours, batch), run(theirs, batch))


@pytest.mark.parametrize("family", ["Mistral", "Gemma2"])
def test_a_models_own_window_is_kept_and_never_widened(family):
    model, batch = (
        small(family, sliding_window=12),
        make_batch(2, 90),
    )  # this Gemma 2 has it in the first layer
    with pytest.raises(ValueError, match="own 12"):
        apply_sliding_window(model, window=13)
    with pytest.raises(ValueError, match="own 12"):
        apply_sliding_window(model, window=12, sinks=1, layers=[0])
    reach = [(12, 0), (5, 0)]
    expected = run(reference_twin(model, reach), batch)
    assert_same_gradients(run(apply_sliding_window(model, window=5, layers=[1]), batch), expected)
    expected = run(reference_twin(model, [(4, 0), (4, 0)]), batch)
    assert_same_gradients(run(apply_sliding_window(model, window=4), batch), expected)


def test_autocast_adapters_and_deep_copies(llama):
    model, batch = apply_lora(llama), make_batch(2, 150)
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


@pytest.mark.parametrize("sinks", [0, 3])
def test_the_cache_gives_what_the_whole_row_gives(tiny, sinks):
    model = without_cap(tiny)
    hybrid = model.config.model_type == "gemma2"  # its first layer has a window: no sinks there
    for part in (model.config, *model.modules()):
        if getattr(part, "sliding_window", None):
            part.sliding_window = (
                None if sinks and not hybrid else 30
            )  # with 30 the model's own cache forgets
    apply_sliding_window(model.eval(), window=20, sinks=sinks, layers=[1] if hybrid else None)
    ids = torch.randint(1, 128, (2, 110))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        first = model(ids[:, :80], use_cache=True)
        parts, cache = [first.logits], first.past_key_values
        for start, end in [(80, 95), *((i, i + 1) for i in range(95, 110))]:
            parts.append(model(ids[:, start:end], past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-5, rtol=1e-5)
    generated = model.generate(ids[:, :50], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(generated[:, 50], expected[:, 49].argmax(-1))


def test_saved_models_do_not_name_the_window(llama, tmp_path):
    llama.save_pretrained(tmp_path)
    before = (tmp_path / "config.json").read_text()
    apply_sliding_window(llama, window=5).save_pretrained(tmp_path)
    assert (tmp_path / "config.json").read_text() == before
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    batch = make_batch()
    assert loaded.config._attn_implementation == "sdpa"
    assert not torch.equal(
        loaded(**batch).loss, llama(**batch).loss
    )  # full attention again, as the docstring says
    torch.testing.assert_close(
        apply_sliding_window(loaded, window=5)(**batch).loss, llama(**batch).loss
    )


def test_models_that_cannot_have_it_are_refused(llama):
    for options, message in [
        ({"window": 0}, "window=0"),
        ({"window": 64.0}, "whole numbers"),
        ({"window": 4, "sinks": -1}, "sinks=-1"),
        ({"window": 4, "layers": [0, 2]}, r"layers=\[0, 2\]: give indices from 0 to 1"),
        ({"window": 4, "layers": []}, "give indices"),
    ]:
        with pytest.raises(ValueError, match=message):
            apply_sliding_window(llama, **options)
    gemma = model_of_shape("tiny-gemma2", device="cpu")
    with pytest.raises(ValueError, match="attn_logit_softcapping=50"):
        apply_sliding_window(gemma, window=4)
    gemma.config.attn_logit_softcapping = None  # the attention modules still cap
    with pytest.raises(ValueError, match="no softcap"):
        apply_sliding_window(gemma, window=4)(**make_batch())
    llama.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(ValueError, match="every block needs one attention"):
        apply_sliding_window(llama, window=4)


def test_batches_that_it_cannot_take_are_refused(llama, batch):
    model = apply_sliding_window(llama, window=4)
    left = {name: tensor.flip(1) for name, tensor in batch.items()}
    packed = {
        "input_ids": batch["input_ids"],
        "position_ids": torch.arange(23).remainder(9).expand(4, -1),
    }
    square = {"input_ids": batch["input_ids"], "attention_mask": torch.zeros(4, 1, 23, 23)}
    for rows in (left, packed):
        with pytest.raises(ValueError, match="give one text per row, padded on the right"):
            model(**rows, use_cache=False)
    everyone = {"attention_mask": torch.ones_like(batch["input_ids"])}
    for options in (
        {},
        everyone,
        everyone | {"use_cache": False},
    ):  # of which transformers sees nothing
        with pytest.raises(ValueError, match="positions restart, as in packed rows"):
            model(**packed, **options)
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
        estimate_sliding_window(seq_len=8, window=0)


@pytest.mark.parametrize(("seq_len", "window"), [(2000, 100), (4000, 512), (300, 400)])
def test_the_estimate_counts_the_scores(monkeypatch, seq_len, window):
    counted, real = [], sliding_window.F.scaled_dot_product_attention

    def spy(q, k, *args, is_causal=False, **options):
        counted.append(q.shape[:-1].numel() * k.shape[2] / (2 if is_causal else 1))
        return real(q, k, *args, is_causal=is_causal, **options)

    monkeypatch.setattr(sliding_window.F, "scaled_dot_product_attention", spy)
    sliding_window_attention(*random_qkv(1, 2, 1, seq_len, 8), window=window)
    ratio = 2 * seq_len**2 / 2 / sum(counted)  # two heads
    assert estimate_sliding_window(seq_len=seq_len, window=window) == pytest.approx(
        ratio, rel=0.001
    )


def test_the_estimate_in_the_limit():
    assert estimate_sliding_window(seq_len=2**20, window=512) == pytest.approx(
        2**20 / (2.5 * 512), rel=0.01
    )
    assert estimate_sliding_window(seq_len=100, window=100) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["auto", "flex", "banded"])
@pytest.mark.parametrize("sinks", [0, 5])
def test_equal_to_the_dense_mask_on_gpu(kernel, sinks):
    qkv = [x.detach().bfloat16() for x in random_qkv(2, 6, 2, 1111, 64)]
    exact = with_gradients(
        lambda *x: dense(*x, 200, sinks), [x.double().requires_grad_() for x in qkv]
    )
    qkv = [x.cuda().requires_grad_() for x in qkv]
    out = sliding_window_attention(*qkv, window=200, sinks=sinks, kernel=kernel)
    torch.manual_seed(1)
    upstream = torch.randn(out.shape).bfloat16().cuda()
    for value, reference in zip([out, *torch.autograd.grad(out, qkv, upstream)], exact):
        assert (value.cpu().double() - reference).norm() <= 1e-2 * reference.norm()


@pytest.mark.gpu
def test_a_model_under_autocast_on_gpu(llama):
    """Rotary embeddings leave q and k in fp32 beside v in bf16, which FlexAttention does not take."""
    batch = make_batch(2, 300)
    expected = run(reference_twin(llama, [(40, 0)] * 2), batch)
    apply_sliding_window(llama.cuda(), window=40)
    with torch.autocast("cuda", torch.bfloat16):
        got = run(llama, {name: tensor.cuda() for name, tensor in batch.items()})
    for name, value in expected.items():
        assert (got[name].cpu() - value).norm() < 0.03 * value.norm(), name
