"""Flash attention equals eager attention, takes the kernel that fits, and says what has none."""

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
import transformers

from recipes_lib.attention import flash
from recipes_lib.attention.flash import (
    apply_flash_attention,
    best_kernel,
    plain_attention,
    running_softmax_attention,
)
from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.model import model_of_shape
from tests.attention.qkv import random_qkv, with_gradients
from tests.conftest import assert_same_gradients, make_batch, run, without_cap
from tests.small_models import small_model


def eager_twin(model):
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    return twin


def relative_error(got, expected):
    """|got - expected| / |expected|, in norms, of the loss and of all gradients together."""
    assert got.keys() == expected.keys()
    differences = [(got[name] - expected[name]).float().norm() for name in expected]
    sizes = [tensor.float().norm() for tensor in expected.values()]
    return (torch.stack(differences).norm() / torch.stack(sizes).norm()).item()


# --- the idea --------------------------------------------------------------------------------


def sdpa(q, k, v):
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("block_size", [5, 64])  # the last block is shorter, or the only one
def test_the_running_softmax_equals_all_scores_at_once(block_size):
    """An old sum that is not corrected when a larger score comes."""
    qkv = random_qkv(2, 6, 2, 19, 8, torch.float64)
    running = functools.partial(running_softmax_attention, block_size=block_size)
    results = zip(
        with_gradients(running, qkv),
        with_gradients(plain_attention, qkv),
        with_gradients(sdpa, qkv),
    )
    for got, plain, exact in results:
        torch.testing.assert_close(got, plain, atol=1e-6, rtol=1e-5)  # whose softmax is in fp32
        torch.testing.assert_close(got, exact, atol=1e-13, rtol=1e-12)


# --- the technique ---------------------------------------------------------------------------


def test_equal_to_eager_in_bf16_and_under_autocast(batch):
    """Both round to 8 bits at every step: they may differ as much as either does from fp32."""
    model = model_of_shape("tiny-qwen3", device="cpu")
    exact = run(eager_twin(model), batch)
    with torch.autocast("cpu", torch.bfloat16):
        expected = run(eager_twin(model), batch)
        got = run(apply_flash_attention(copy.deepcopy(model)), batch)
    assert relative_error(got, expected) < 0.02
    assert relative_error(got, exact) < 0.02
    model.to(torch.bfloat16)
    expected = run(eager_twin(model), batch)
    got = run(apply_flash_attention(model), batch)
    assert relative_error(got, expected) < 0.02


def masks_seen(monkeypatch):
    """A list that every call of SDPA's attention joins: did it get a mask?"""
    from transformers.integrations import sdpa_attention

    seen = []
    real = sdpa_attention.sdpa_attention_forward

    def spy(module, query, key, value, attention_mask, **options):
        seen.append(attention_mask is not None)
        return real(module, query, key, value, attention_mask, **options)

    monkeypatch.setattr(sdpa_attention, "sdpa_attention_forward", spy)
    return seen


def test_padding_on_the_right_needs_no_mask(llama, batch, monkeypatch):
    """On CUDA a mask [B, 1, S, S] takes the flash kernel away."""
    expected = run(eager_twin(llama), batch)
    apply_flash_attention(llama)
    seen = masks_seen(monkeypatch)
    assert (batch["attention_mask"] == 0).any()
    assert_same_gradients(run(llama, batch), expected)
    assert seen == [False, False]


def test_padding_on_the_left_and_packed_rows_are_masked(llama, batch, monkeypatch):
    """Without it a text reads padding, and a document the one before it."""
    left = {name: tensor.flip(1) for name, tensor in batch.items()}
    starts = torch.nn.functional.pad(left["attention_mask"].diff(dim=1), (1, 0)) == 1
    left["labels"][starts] = -100  # otherwise padding would have to predict the first token
    packed = {
        "input_ids": batch["input_ids"],
        "labels": batch["input_ids"],
        "position_ids": torch.cat([torch.arange(9), torch.arange(14)]).expand(4, -1),
    }
    for rows in (left, packed):
        expected = run(eager_twin(llama), rows)
        fused = apply_flash_attention(copy.deepcopy(llama))
        seen = masks_seen(monkeypatch)
        assert_same_gradients(run(fused, rows), expected)
        assert seen == [True, True]


def test_generation_with_the_cache_is_eagers():
    """The masks of left padding and of one query beside many keys; Gemma's cache forgets."""
    model = without_cap(model_of_shape("tiny-gemma2", device="cpu")).eval()
    prompt = torch.randint(1, 128, (2, 9))
    mask = torch.ones_like(prompt)
    mask[1, :3] = 0  # a shorter prompt, padded on the left
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = eager_twin(model).generate(prompt, **options)
    assert torch.equal(apply_flash_attention(model).generate(prompt, **options), expected)


# --- what is refused -------------------------------------------------------------------------


def test_capped_scores_are_refused(batch):
    """SDPA would leave the cap out, and train another model."""
    gemma = model_of_shape("tiny-gemma2", device="cpu")
    for call in (best_kernel, apply_flash_attention):
        with pytest.raises(ValueError, match=r"cannot cap scores.*eager"):
            call(gemma)
    assert gemma.config._attn_implementation == "eager"
    gemma.config.attn_logit_softcapping = None  # the attention modules still cap
    with pytest.raises(ValueError, match="fused attention has no softcap"):
        apply_flash_attention(gemma)(**batch)


def test_dropout_has_no_kernel_on_a_cpu(batch):
    """The scores would be back, in silence."""
    model = apply_flash_attention(model_of_shape("tiny-gpt2", device="cpu"))
    for module in model.modules():
        if hasattr(module, "attn_dropout"):
            module.attn_dropout.p = 0.1
    with pytest.raises(ValueError, match="fused attention has no dropout"):
        model(**batch)
    assert model.eval()(**batch).loss > 0


def test_another_techniques_attention_is_not_undone(llama):
    """A window would be gone, and the model another one."""
    transformers.AttentionInterface.register("other", flash.fused_attention)
    llama.set_attn_implementation("other")
    with pytest.raises(ValueError, match=r"'other', which this would undo"):
        apply_flash_attention(llama)


def test_attention_that_selects_its_keys_is_refused():
    """The indexer of DeepSeek-V3.2 gives its choice as an option that SDPA does not read."""
    with torch.device("meta"):
        model = small_model("DeepseekV32", q_lora_rank=16)
    with pytest.raises(ValueError, match="not those that this model's indexer selects"):
        apply_flash_attention(model)


# --- the choice ------------------------------------------------------------------------------

HOPPER = (9, 0)
AMPERE = (8, 0)
TURING = (7, 5)
BF16 = torch.bfloat16
CAP = {"attn_logit_softcapping": 50.0}
DROPOUT = {"attention_dropout": 0.1}
FA2 = "flash_attention_2"
FA3 = "flash_attention_3"
CASES = [  # compute capability, dtype, flash-attn installed, config -> kernel, a word of the reason
    (HOPPER, BF16, {2, 3}, {}, FA3, ""),
    (HOPPER, BF16, {2}, {}, "fused_cudnn", "flash_attention_3 is not installed"),
    (HOPPER, BF16, {2}, {"head_dim": 256}, FA2, "takes heads of 128"),
    (HOPPER, BF16, {2, 3}, DROPOUT, "fused_cudnn", "no attention dropout"),
    (HOPPER, BF16, {2}, CAP, FA2, "fused_cudnn cannot cap"),
    (HOPPER, BF16, set(), CAP, None, "flex_attention"),
    (HOPPER, torch.float32, {2, 3}, {}, "fused", "K and V repeated"),
    (AMPERE, torch.float16, {2, 3}, {}, FA2, "flash_attention_3 needs CUDA capability 9.x"),
    (AMPERE, BF16, set(), {}, "fused", "SDPA's flash kernel;"),
    (TURING, torch.float16, {2}, {}, "fused", "flash_attention_2 needs CUDA capability 8.x"),
]


@pytest.mark.parametrize(("capability", "dtype", "installed", "options", "kernel", "reason"), CASES)
def test_the_choice_on_gpus(monkeypatch, capability, dtype, installed, options, kernel, reason):
    """One row of the table of kernels is wrong: no machine here has all of these cards."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = SimpleNamespace(
        config=transformers.LlamaConfig(**sizes | options),
        device=torch.device("cuda"),
        dtype=torch.float32,
        _supports_sdpa=True,
        _supports_flash_attn=True,
        _supports_attention_backend=True,
    )
    utils = transformers.utils
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(utils, "is_flash_attn_3_available", lambda: 3 in installed)
    monkeypatch.setattr(utils, "is_flash_attn_greater_or_equal", lambda version: 2 in installed)
    if kernel is None:
        with pytest.raises(ValueError, match=reason):
            best_kernel(model, dtype=dtype)
    else:
        got = best_kernel(model, dtype=dtype)
        assert got.implementation == kernel
        assert reason in got.why


# --- on a GPU --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equal_to_eager_for_less_memory_on_gpu(dtype):
    """In fp32 no kernel takes grouped heads, and the scores would be back."""
    model = model_of_shape("tiny-llama", layers=4, dtype=dtype, device="cuda")
    batch = {name: tensor.cuda() for name, tensor in make_batch(2, 1024).items()}
    batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    model.set_attn_implementation("eager")
    with PeakMemory() as eager:
        expected = run(model, batch)
    apply_flash_attention(model)
    with PeakMemory() as fused:
        got = run(model, batch)
    tolerance = {torch.bfloat16: 0.02, torch.float32: 1e-3}[dtype]
    assert relative_error(got, expected) < tolerance
    assert fused.peak < 0.7 * eager.peak
