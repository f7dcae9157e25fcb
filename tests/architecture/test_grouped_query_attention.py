import pytest
import torch
import transformers

from recipes_lib.architecture.grouped_query_attention import (
    apply_grouped_query_attention,
    cache_bytes,
    mean_of_groups,
    predicted_cache_bytes,
)
from recipes_lib.fine_tuning.lora import apply_lora
from tests.families.configs import tiny_model
from tests.small_models import IDS, as_if_trained, small_model

# Biases of keys and values; norms of queries and keys, and windows.
FAMILIES = {"Qwen2": {}, "Gemma3Text": {"head_dim": 16, "sliding_window": 8}}


def small(family, *, kv_heads=8, **options):
    """A model of 8 heads whose biases and norms are as random as trained ones."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": kv_heads}
    return as_if_trained(small_model(family, **sizes | FAMILIES.get(family, {}) | options))


def test_mean_in_plain_words():
    """The mistake: heads that are no neighbours, or a sum in 16 bits."""
    weight = torch.tensor([[0.0], [1], [10], [11], [100], [101], [200], [201]])  # 4 heads, E = 2
    expected = torch.tensor([[5.0], [6], [150], [151]])
    assert torch.equal(mean_of_groups(weight, heads=4, groups=2), expected)
    assert torch.equal(mean_of_groups(weight[:, 0], heads=4, groups=2), expected[:, 0])
    many = torch.full((16, 1), 1.0078125, dtype=torch.bfloat16)
    assert torch.equal(mean_of_groups(many, heads=16, groups=1), many[:1])


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_saved_loaded_and_cached(family, tmp_path):
    """The mistakes: a file with the old number of heads, a cache as large as before."""
    model = apply_grouped_query_attention(small(family), kv_heads=2)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(IDS).logits, model(IDS).logits)

    cache = model(IDS, use_cache=True).past_key_values
    assert cache_bytes(cache) == predicted_cache_bytes(model, tokens=12, batch=2)
    before = small(family)
    assert predicted_cache_bytes(before, tokens=12, batch=2) == 4 * cache_bytes(cache)
    assert predicted_cache_bytes(before, tokens=12, batch=2, kv_heads=2) == cache_bytes(cache)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    with_cache = model.generate(IDS[:1], **options)
    assert torch.equal(with_cache, model.generate(IDS[:1], use_cache=False, **options))


def test_what_was_frozen_stays_frozen_and_dtypes_stay():
    """The mistake: new projections that train where the old ones did not."""
    model = small("Qwen2").to(torch.bfloat16)
    model.model.layers[0].self_attn.k_proj.requires_grad_(False)
    apply_grouped_query_attention(model, kv_heads=4)
    first, second = [layer.self_attn for layer in model.model.layers]
    assert not first.k_proj.weight.requires_grad and not first.k_proj.bias.requires_grad
    assert second.k_proj.weight.requires_grad and first.v_proj.bias.requires_grad
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


# What could not load again, would average heads that are no neighbours, or does nothing.
REFUSED = {
    "mimo_v2_flash": "layers.1.self_attn has 4 heads of keys, and the configuration 2",
    "gpt2": "num_key_value_heads",
    "phi3": "qkv_proj.weight depends on the number of heads",
    "stablelm": "k_layernorm.norms.1.weight depends on the number of heads",
}

OPTIONS = {"stablelm": {"qk_layernorm": True}}  # a norm for each head


@pytest.mark.parametrize("family", REFUSED)
def test_families_that_are_refused_stay_as_they_are(family):
    """The mistake: half of the blocks are pooled, or the configuration alone has changed."""
    model = tiny_model(family, **OPTIONS.get(family, {}))
    config = str(model.config)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=REFUSED[family]):
        apply_grouped_query_attention(model, kv_heads=1)
    after = model.state_dict()
    assert str(model.config) == config
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_blocks_that_read_the_keys_of_others(tmp_path):
    """The mistake: blocks without projections of their own repeat the heads as often as before."""
    kinds = ["sliding_attention", "full_attention"] * 2
    options = {"activation_sparsity_pattern": [0.0] * 4, "num_kv_shared_layers": 2}
    model = tiny_model("gemma3n_text", num_hidden_layers=4, layer_types=kinds, **options)
    apply_grouped_query_attention(model, kv_heads=1)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(IDS).logits, model.eval()(IDS).logits)


def test_numbers_of_heads_and_adapters_that_do_not_fit():
    """The mistake: an adapter that is dropped with the projection below it."""
    with pytest.raises(ValueError, match="kv_heads=3: choose one of 1, 2, 4"):
        apply_grouped_query_attention(small("Llama"), kv_heads=3)
    with pytest.raises(ValueError, match="is as it was"):
        apply_grouped_query_attention(apply_lora(small("Llama")), kv_heads=2)
