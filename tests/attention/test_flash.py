import copy
import functools
import gc
from types import SimpleNamespace

import pytest
import torch
import transformers

from recipes_lib.attention import flash
from recipes_lib.attention.flash import (
    apply_flash_attention,
    best_kernel,
    estimate_flash_attention,
    plain_attention,
)
from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.plain_step import budget_of
from recipes_lib.fine_tuning.lora import apply_lora
from recipes_lib.workflows.bench.attention import measure_attention
from tests.conftest import assert_same_gradients, make_batch, run, without_cap


def eager_twin(model):
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    return twin


def relative_error(got, expected):
    """The largest |got - expected| / |expected|, in norms, of the loss and of all gradients together."""
    assert got.keys() == expected.keys()
    difference = torch.stack(
        [(got[name] - expected[name]).float().norm() for name in expected]
    ).norm()
    return (
        difference / torch.stack([tensor.float().norm() for tensor in expected.values()]).norm()
    ).item()


@pytest.mark.parametrize(("batch_size", "seq_len"), [(4, 23), (1, 131), (2, 5)])
def test_equal_to_eager(tiny, batch_size, seq_len):
    model, batch = without_cap(tiny), make_batch(batch_size, seq_len)
    expected = run(eager_twin(model), batch)
    assert_same_gradients(run(apply_flash_attention(model), batch), expected)
    assert model.config._attn_implementation == "fused"


def test_equal_to_eager_in_bf16_and_under_autocast(tiny, batch):
    """Both round to 8 bits at every step: they may differ as much as either does from fp32."""
    model = without_cap(tiny)
    exact = run(eager_twin(model), batch)
    with torch.autocast("cpu", torch.bfloat16):
        expected, got = (
            run(eager_twin(model), batch),
            run(apply_flash_attention(copy.deepcopy(model)), batch),
        )
    assert relative_error(got, expected) < 0.02 and relative_error(got, exact) < 0.02
    model.to(torch.bfloat16)
    expected, got = run(eager_twin(model), batch), run(apply_flash_attention(model), batch)
    assert relative_error(got, expected) < 0.02


@pytest.mark.parametrize("family", ["Mistral", "Qwen3", "Gemma2"])
def test_layers_with_a_window_of_their_own_keep_it(family, batch):
    """23 tokens, a window of 6: in every layer, in the second, in the first."""
    options = {"use_sliding_window": True, "max_window_layers": 1} if family == "Qwen3" else {}
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    sizes |= {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 128,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = getattr(transformers, f"{family}Config")(
        sliding_window=6, pad_token_id=None, **sizes, **options
    )
    model = without_cap(transformers.AutoModelForCausalLM.from_config(config))
    expected = run(eager_twin(model), batch)
    assert_same_gradients(run(apply_flash_attention(model), batch), expected)
    wide = copy.deepcopy(model)
    for part in (wide.config, *wide.modules()):
        if getattr(part, "sliding_window", None):
            part.sliding_window = 100
    assert relative_error(run(wide, batch), expected) > 1e-3  # the window matters


def masks_seen(monkeypatch):
    from transformers.integrations import sdpa_attention

    seen, real = [], sdpa_attention.sdpa_attention_forward

    def spy(module, query, key, value, attention_mask, **options):
        seen.append(attention_mask is not None)
        return real(module, query, key, value, attention_mask, **options)

    monkeypatch.setattr(sdpa_attention, "sdpa_attention_forward", spy)
    return seen


def test_padding_on_the_right_needs_no_mask(llama, batch, monkeypatch):
    expected, seen = run(eager_twin(llama), batch), masks_seen(monkeypatch)
    assert (batch["attention_mask"] == 0).any()
    assert_same_gradients(run(apply_flash_attention(llama), batch), expected)
    assert seen == [False, False]


def test_padding_on_the_left_and_packed_rows_are_masked(llama, batch, monkeypatch):
    left = {name: tensor.flip(1) for name, tensor in batch.items()}
    starts = torch.nn.functional.pad(left["attention_mask"].diff(dim=1), (1, 0)) == 1
    left["labels"][starts] = -100  # otherwise padding would have to predict the first token
    position_ids = torch.cat([torch.arange(9), torch.arange(14)]).expand(4, -1)
    packed = {
        "input_ids": batch["input_ids"],
        "labels": batch["input_ids"],
        "position_ids": position_ids,
    }
    for rows in (left, packed):
        expected = run(eager_twin(llama), rows)
        seen = masks_seen(monkeypatch)
        assert_same_gradients(run(apply_flash_attention(llama), rows), expected)
        assert seen == [True, True]


def test_generation_with_the_cache_is_eagers(tiny):
    model, prompt = without_cap(tiny).eval(), torch.randint(1, 128, (2, 9))
    mask = torch.ones_like(prompt)
    mask[1, :3] = 0  # a shorter prompt, padded on the left
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = eager_twin(model).generate(prompt, **options)
    assert torch.equal(apply_flash_attention(model).generate(prompt, **options), expected)


def test_adapters_and_deep_copies(llama, batch):
    model = apply_lora(llama)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    expected = run(eager_twin(model), batch)
    twin = copy.deepcopy(apply_flash_attention(model))
    assert_same_gradients(run(twin, batch), expected)
    assert twin.config._attn_implementation == "fused"


def test_saved_models_do_not_name_the_kernel(llama, tmp_path):
    apply_flash_attention(llama).save_pretrained(tmp_path)
    assert "fused" not in (tmp_path / "config.json").read_text()
    assert (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation
        == "sdpa"
    )


def test_what_no_kernel_computes_is_refused(llama, batch):
    gemma = model_of_shape("tiny-gemma2", device="cpu")
    plan = budget_of(gemma, batch_size=1, seq_len=8)
    estimate = functools.partial(estimate_flash_attention, plan, batch_size=1, seq_len=8)
    for call in (best_kernel, apply_flash_attention, estimate):
        with pytest.raises(ValueError, match=r"cannot cap scores.*eager"):
            call(gemma)
    assert gemma.config._attn_implementation == "eager"
    gemma.config.attn_logit_softcapping = None  # the attention modules still cap
    with pytest.raises(ValueError, match="fused kernels have no softcap"):
        apply_flash_attention(gemma)(**batch)
    with pytest.raises(ValueError, match="choose auto or one of"):
        apply_flash_attention(llama, kernel="flash")
    with pytest.raises(ValueError, match="needs CUDA"):
        apply_flash_attention(llama, kernel="flash_attention_2")
    with pytest.raises(ValueError, match="fused kernels have no output_attentions"):
        apply_flash_attention(llama)(**batch, output_attentions=True)


def test_dropout_has_no_kernel_on_a_cpu(batch):
    model = apply_flash_attention(model_of_shape("tiny-gpt2", device="cpu"))
    for module in model.modules():
        if hasattr(module, "attn_dropout"):
            module.attn_dropout.p = 0.1
    with pytest.raises(ValueError, match="fused kernels have no dropout"):
        model(**batch)
    assert model.eval()(**batch).loss > 0


def test_another_techniques_attention_is_not_undone(llama):
    transformers.AttentionInterface.register("other", flash._fused)
    llama.set_attn_implementation("other")
    with pytest.raises(ValueError, match=r"'other', which this would undo"):
        apply_flash_attention(llama)


def test_cudnn_comes_first_only_inside_its_attention(llama, batch, monkeypatch):
    from transformers.integrations import sdpa_attention

    expected = run(eager_twin(llama), batch)
    seen, real, order = (
        [],
        sdpa_attention.sdpa_attention_forward,
        torch._C._get_sdp_priority_order(),
    )

    def spy(*args, **options):
        seen.append(torch._C._get_sdp_priority_order()[0])
        return real(*args, **options)

    monkeypatch.setattr(sdpa_attention, "sdpa_attention_forward", spy)
    apply_flash_attention(llama).set_attn_implementation(
        "fused_cudnn"
    )  # on a CPU, the next in the order
    assert_same_gradients(run(llama, batch), expected)
    assert seen == [int(torch.nn.attention.SDPBackend.CUDNN_ATTENTION)] * 2
    assert torch._C._get_sdp_priority_order() == order


CASES = [  # compute capability, dtype, flash-attn installed, config -> kernel, a word of the reason
    ((9, 0), torch.bfloat16, {2, 3}, {}, "flash_attention_3", ""),
    ((9, 0), torch.bfloat16, {2}, {}, "fused_cudnn", "flash_attention_3 is not installed"),
    ((9, 0), torch.bfloat16, {2}, {"head_dim": 256}, "flash_attention_2", "takes heads of 128"),
    (
        (9, 0),
        torch.bfloat16,
        {2, 3},
        {"attention_dropout": 0.1},
        "fused_cudnn",
        "no attention dropout",
    ),
    ((9, 0), torch.bfloat16, {2, 3}, {"attn_logit_softcapping": 50.0}, "flash_attention_3", ""),
    (
        (9, 0),
        torch.bfloat16,
        {2},
        {"attn_logit_softcapping": 50.0},
        "flash_attention_2",
        "fused_cudnn cannot cap",
    ),
    ((9, 0), torch.bfloat16, set(), {"attn_logit_softcapping": 50.0}, None, "flex_attention"),
    ((9, 0), torch.float32, {2, 3}, {}, "fused", "K and V repeated"),
    (
        (9, 0),
        torch.float32,
        {2, 3},
        {"num_key_value_heads": 4},
        "fused",
        "memory-efficient kernel;",
    ),
    (
        (8, 0),
        torch.float16,
        {2, 3},
        {},
        "flash_attention_2",
        "flash_attention_3 needs CUDA capability 9.x",
    ),
    ((8, 0), torch.bfloat16, set(), {}, "fused", "SDPA's flash kernel;"),
    ((7, 5), torch.float16, {2}, {}, "fused", "flash_attention_2 needs CUDA capability 8.x"),
    ((7, 5), torch.float16, set(), {}, "fused", "K and V repeated"),
]


@pytest.mark.parametrize(("capability", "dtype", "installed", "options", "kernel", "reason"), CASES)
def test_the_choice_on_gpus(monkeypatch, capability, dtype, installed, options, kernel, reason):
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2} | options
    support = {
        "_supports_sdpa": True,
        "_supports_flash_attn": True,
        "_supports_attention_backend": True,
    }
    config = transformers.LlamaConfig(**sizes)
    model = SimpleNamespace(
        config=config, device=torch.device("cuda"), dtype=torch.float32, **support
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(transformers.utils, "is_flash_attn_3_available", lambda: 3 in installed)
    monkeypatch.setattr(
        transformers.utils, "is_flash_attn_greater_or_equal", lambda version: 2 in installed
    )
    if kernel is None:
        with pytest.raises(ValueError, match=reason):
            best_kernel(model, dtype=dtype)
    else:
        got = best_kernel(model, dtype=dtype)
        assert got.implementation == kernel and reason in got.why


def peak_of(model, ids):
    for _ in range(2):  # the first step makes the optimizer's states
        with PeakMemory() as memory:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            model.optimizer.step()
            model.optimizer.zero_grad()
    return memory.peak


@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-mistral", "tiny-gpt2"])
def test_peak_falls_as_estimated(shape):
    gc.collect()  # the models before this one are not part of the step
    model, sizes = model_of_shape(shape, layers=6, device="cpu"), {"batch_size": 2, "seq_len": 256}
    model.set_attn_implementation("eager")
    object.__setattr__(model, "optimizer", torch.optim.AdamW(model.parameters(), fused=True))
    plan, ids = budget_of(model, **sizes), torch.randint(0, 128, (2, 256))
    planned = estimate_flash_attention(plan, model, **sizes)
    assert model.config._attn_implementation == "eager"
    eager, fused = peak_of(model, ids), peak_of(apply_flash_attention(model), ids)
    assert fused < 0.75 * eager
    assert planned.peak == pytest.approx(fused, rel=0.03)
    assert plan.peak - planned.peak == pytest.approx(eager - fused, rel=0.1)
    assert estimate_flash_attention(planned, model, **sizes) == planned  # it has the kernel already


def test_one_layer_measured():
    model = model_of_shape("tiny-llama", device="cpu")
    short, long = (measure_attention(model, seq_len=length, rounds=1) for length in (256, 512))
    assert short.keys() == {"eager", "fused"}
    assert long["eager"].peak_bytes > 3.8 * short["eager"].peak_bytes  # S^2
    assert long["fused"].peak_bytes == pytest.approx(2 * short["fused"].peak_bytes, rel=0.01)  # S
    assert measure_attention(model, seq_len=64, eager=False, rounds=1).keys() == {"fused"}
    cost = long["fused"]
    seconds = cost.forward_seconds + cost.backward_seconds
    assert cost.tflops * 1e12 * seconds == pytest.approx(3.5 * 512 * 513 / 2 * 4 * 64, rel=0.01)


def test_plain_attention_is_the_reference():
    q, k, v = (torch.randn(2, heads, 19, 8, dtype=torch.float64) for heads in (6, 2, 2))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(plain_attention(q, k, v).transpose(1, 2), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equal_to_eager_for_less_memory_on_gpu(dtype):
    model = model_of_shape("tiny-llama", layers=4, dtype=dtype, device="cuda")
    batch = {name: tensor.cuda() for name, tensor in make_batch(2, 1024).items()}
    batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    results = []
    for kernel in ("eager", "auto"):
        model.set_attn_implementation("eager") if kernel == "eager" else apply_flash_attention(
            model
        )
        with PeakMemory() as memory:
            results.append((run(model, batch), memory))
    (expected, eager), (got, fused) = results
    assert relative_error(got, expected) < (0.02 if dtype == torch.bfloat16 else 1e-3)
    assert fused.peak < 0.7 * eager.peak
