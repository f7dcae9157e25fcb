"""Attention in groups of heads is the same attention, for less memory."""

import copy

import pytest
import torch
import transformers

from recipes_lib.attention.flash import apply_flash_attention
from recipes_lib.attention.head_groups import (
    InHeadGroups,
    apply_head_groups,
    attention_by_groups,
)
from recipes_lib.core.measure import PeakMemory, dry_run
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.bytes_of_tensors import weight_bytes
from recipes_lib.core.model.mixins import take_out
from recipes_lib.fine_tuning.lora import apply_lora
from recipes_lib.fine_tuning.qlora import apply_qlora
from recipes_lib.memory.activation_checkpointing import (
    apply_activation_checkpointing,
)
from recipes_lib.memory.tiled_mlp import apply_tiled_mlp
from tests.conftest import assert_near, assert_same_gradients, run
from tests.small_models import train_a_little

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "pad_token_id": None,
}


def model_of(family, **sizes):
    config = getattr(transformers, f"{family}Config")(**SIZES | sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # also the biases, which begin at zero
        torch.nn.init.normal_(parameter, std=0.05)
    return model


# --- the same model -------------------------------------------------------------------------------


def test_the_idea_is_the_technique():
    """By hand, beside a layer without rotary positions: the same sum over groups."""
    x = torch.randn(11, 32)
    query, output = torch.randn(2, 32, 32)
    key, value = torch.randn(2, 16, 32)
    in_one = attention_by_groups(x, query, key, value, output, heads=8, groups=1)
    in_four = attention_by_groups(x, query, key, value, output, heads=8, groups=4)
    q = (x @ query.T).view(11, 8, 4).transpose(0, 1)
    k, v = ((x @ w.T).view(11, 4, 4).transpose(0, 1).repeat_interleave(2, 0) for w in (key, value))
    scores = (q @ k.transpose(1, 2) / 2).masked_fill(torch.ones(11, 11).triu(1).bool(), -torch.inf)
    expected = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ output.T
    torch.testing.assert_close(in_one, expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(in_four, expected, rtol=1e-4, atol=1e-3)


def test_the_bias_of_the_output_is_added_once(batch):
    """The mistake: once per group."""
    model = model_of("Llama", attention_bias=True)
    expected = run(model, batch)
    assert_same_gradients(run(apply_head_groups(model, groups=2), batch), expected, atol=1e-5)


def test_with_everything_for_long_rows(batch):
    """The mistake: an outer checkpoint and those of the groups recompute each other's tensors."""
    model = model_of("Llama")
    expected = run(copy.deepcopy(model), batch)
    apply_flash_attention(model)
    apply_tiled_mlp(model, tile_size=7, norms=True)
    apply_head_groups(model)
    apply_activation_checkpointing(model)
    assert_same_gradients(run(model, batch), expected, atol=1e-5)


@pytest.mark.parametrize("four_bits", [False, True])
def test_adapters(four_bits, batch):
    """The mistake: an adapter keeps its full width, or is left out."""
    model = model_of_shape("tiny-llama", device="cpu")
    if four_bits:
        pytest.importorskip("bitsandbytes")
        model = apply_qlora(model)
    else:
        model = apply_lora(model)
    expected = run(train_a_little(model), batch)
    assert any("q_proj.lora_A" in name for name in expected)
    got = run(apply_head_groups(model), batch)
    if four_bits:
        # These layers compute in bf16 where that is fast: the sum over groups rounds otherwise.
        assert_near(got, expected, 0.02)
    else:
        assert_same_gradients(got, expected, atol=1e-5, rtol=1e-4)


def test_generation_is_as_before():
    """The mistake: a cache gets the keys of each group as further tokens."""
    model = model_of("Llama").eval()
    prompt = torch.arange(1, 8)[None]
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    expected = model.generate(prompt, **options)
    apply_head_groups(model)
    assert torch.equal(model.generate(prompt, **options), expected)
    assert torch.equal(take_out(model, InHeadGroups).generate(prompt, **options), expected)
    apply_head_groups(model)
    model.train()
    assert model(input_ids=prompt, labels=prompt, use_cache=True).loss.requires_grad
    filled = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model.eval()(input_ids=prompt, past_key_values=filled)
    with pytest.raises(ValueError, match="filled KV cache"):
        model.train()(input_ids=prompt, past_key_values=filled)


# --- what is refused ------------------------------------------------------------------------------


def test_what_few_tokens_do_not_show_is_refused():
    """Dropout of an adapter is off while it proves itself; a filled cache arrives later."""
    with pytest.raises(ValueError, match="differ from group to group"):
        apply_head_groups(apply_lora(model_of("Llama"), dropout=0.1))
    with pytest.raises(ValueError, match="cannot be told apart"):
        apply_head_groups(model_of_shape("tiny-gpt2", device="cpu"))
    model = model_of("Llama")
    with pytest.raises(ValueError, match="groups=3"):
        apply_head_groups(model, groups=3)
    apply_head_groups(model, groups=2)
    apply_activation_checkpointing(model, mode="selective", check=False)
    tokens = torch.arange(1, 8)[None]
    with pytest.raises(ValueError, match="selective checkpointing keeps"):
        model.train()(input_ids=tokens, labels=tokens, use_cache=False)


# --- what it saves --------------------------------------------------------------------------------


def test_the_block_of_a_public_shape():
    """The numbers in the docstring: tensors [S, D] at the peak of a block of Llama 3.1 8B."""
    tokens = 65_536
    peaks = []
    for in_groups in (False, True):
        with dry_run():
            model = model_of_shape("llama-3.1-8b", layers=1, dtype=torch.bfloat16, device="cpu")
            apply_flash_attention(model.requires_grad_(False))
            model.enable_input_require_grads()
            apply_tiled_mlp(model, tile_size=1024, norms=True)
            if in_groups:
                apply_head_groups(model)
            apply_activation_checkpointing(model)
            ids = torch.zeros(1, tokens, dtype=torch.long)
            with PeakMemory() as memory:
                model.model(input_ids=ids, use_cache=False).last_hidden_state.sum().backward()
            one_tensor = 2 * tokens * model.config.hidden_size
            peaks.append((memory.peak - weight_bytes(model)) / one_tensor)
    assert peaks == pytest.approx([8.6, 7.1], abs=0.06)
