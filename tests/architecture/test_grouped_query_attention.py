import copy

import pytest
import torch
import transformers
from torch import nn

from recipes_lib.architecture.grouped_query_attention import (
    apply_grouped_query_attention,
    cache_bytes,
    mean_of_groups,
    predicted_cache_bytes,
)
from recipes_lib.core.model import model_of_shape
from recipes_lib.fine_tuning.lora import apply_lora
from tests.families.configs import tiny_model
from tests.small_models import IDS, as_if_trained, small_model

# Biases of keys and values (Qwen 2), norms of queries and keys (Qwen 3, Gemma 3), a head dimension
# that is not hidden / heads (Gemma), windows (Mistral), LayerNorm and biases everywhere.
FAMILIES = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": 8},
    "Gemma2": {"head_dim": 16, "sliding_window": 8},
    "Gemma3Text": {"head_dim": 16, "sliding_window": 8},
    "Starcoder2": {},
    "Phi": {},
}


def small(family, *, kv_heads=8, **options):
    """A model of 8 heads whose biases and norms are as random as trained ones."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": kv_heads}
    return as_if_trained(small_model(family, **sizes | FAMILIES.get(family, {}) | options))


@torch.no_grad()
def with_repeated_heads(grouped):
    """The same function with 8 heads of keys and values, of which those of a group are equal."""
    config = copy.deepcopy(grouped.config)
    groups = config.num_key_value_heads
    config.num_key_value_heads = 8
    whole = type(grouped)(config).eval()
    state = grouped.state_dict()
    for name, weight in state.items():
        if ".k_proj." in name or ".v_proj." in name:
            heads = weight.view(groups, -1, *weight.shape[1:])
            state[name] = heads.repeat_interleave(8 // groups, dim=0).flatten(0, 1)
    whole.load_state_dict(state)
    return whole


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("groups", [4, 1])
@torch.no_grad()
def test_heads_that_are_equal_in_their_group_lose_nothing(family, groups):
    """Heads that are grouped otherwise, or biases that are left, would change the logits."""
    grouped = small(family, kv_heads=groups)
    whole = with_repeated_heads(grouped)
    expected = grouped(IDS).logits
    torch.testing.assert_close(whole(IDS).logits, expected)
    assert apply_grouped_query_attention(whole, kv_heads=groups) is whole
    torch.testing.assert_close(whole(IDS).logits, expected)
    assert whole.state_dict().keys() == grouped.state_dict().keys()


def test_mean_in_plain_words():
    weight = torch.tensor([[0.0], [1], [10], [11], [100], [101], [200], [201]])  # 4 heads, E = 2
    expected = torch.tensor([[5.0], [6], [150], [151]])
    assert torch.equal(mean_of_groups(weight, heads=4, groups=2), expected)
    assert torch.equal(mean_of_groups(weight[:, 0], heads=4, groups=2), expected[:, 0])
    # 16 numbers near 1 in bf16: a sum in bf16 would lose the ends of them.
    many = torch.full((16, 1), 1.0078125, dtype=torch.bfloat16)
    assert torch.equal(mean_of_groups(many, heads=16, groups=1), many[:1])


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_saved_loaded_and_cached(family, tmp_path):
    model = apply_grouped_query_attention(small(family), kv_heads=2)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert again.config.num_key_value_heads == 2
    assert torch.equal(again(IDS).logits, model(IDS).logits)

    cache = model(IDS, use_cache=True).past_key_values
    assert cache_bytes(cache) == predicted_cache_bytes(model, tokens=12, batch=2)
    before = small(family)
    assert predicted_cache_bytes(before, tokens=12, batch=2) == 4 * cache_bytes(cache)
    assert predicted_cache_bytes(before, tokens=12, batch=2, kv_heads=2) == cache_bytes(cache)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    with_cache = model.generate(IDS[:1], **options)
    assert torch.equal(with_cache, model.generate(IDS[:1], use_cache=False, **options))


def test_bytes_of_the_cache_by_hand():
    model = model_of_shape("smollm2-135m", layers=1, device="meta")
    assert predicted_cache_bytes(model, tokens=1000) == 2 * 1 * 1000 * 3 * 64 * 4
    gpt = model_of_shape("tiny-gpt2", device="cpu", dtype=torch.bfloat16)
    assert predicted_cache_bytes(gpt, tokens=10) == 2 * 2 * 10 * 64 * 2


def test_a_short_run_heals():
    """The new projections train: a frozen or detached one would leave the loss where it is."""
    model = small("Llama").train()
    ids = torch.randint(1, 128, (8, 32))

    def train(parameters, *, steps):
        """The losses before each step."""
        optimizer = torch.optim.Adam(parameters, lr=3e-3)
        losses = []
        for _ in range(steps):
            loss = model(ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    trained = train(model.parameters(), steps=60)[-1]
    apply_grouped_query_attention(model, kv_heads=1)
    projections = [
        p for name, p in model.named_parameters() if "k_proj" in name or "v_proj" in name
    ]
    healing = train(projections, steps=20)
    assert healing[0] > 1 > 0.1 > trained  # 2.2 and 0.02
    assert healing[-1] < 0.6 * healing[0]


def test_what_was_frozen_stays_frozen_and_dtypes_stay():
    model = small("Qwen2").to(torch.bfloat16)
    model.model.layers[0].self_attn.k_proj.requires_grad_(False)
    apply_grouped_query_attention(model, kv_heads=4)
    first, second = [layer.self_attn for layer in model.model.layers]
    assert not first.k_proj.weight.requires_grad and not first.k_proj.bias.requires_grad
    assert second.k_proj.weight.requires_grad and first.v_proj.bias.requires_grad
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not first.k_proj.training


@pytest.mark.parametrize(("kv_heads", "message"), [(3, "4, 2, 1|1, 2, 4"), (8, "8 heads"), (0, "")])
def test_numbers_of_heads_that_do_not_fit(kv_heads, message):
    with pytest.raises(ValueError, match=f"kv_heads={kv_heads}: .*({message})"):
        apply_grouped_query_attention(small("Llama"), kv_heads=kv_heads)
    with pytest.raises(ValueError, match="it has one only"):
        apply_grouped_query_attention(small("Llama", kv_heads=1), kv_heads=1)


REFUSED = {
    "no groups": (lambda: model_of_shape("tiny-gpt2", device="cpu"), "knows no groups"),
    "one matrix": (lambda: small("Phi3", pad_token_id=0), "has no k_proj and v_proj"),
    # More blocks than heads, because each head has a norm in a list of modules.
    "a norm per head": (
        lambda: small("StableLm", qk_layernorm=True, num_hidden_layers=9),
        "depends on the number of heads",
    ),
    "a weight per head": (
        lambda: small("Cohere", use_qk_norm=True),
        "depends on the number of heads",
    ),
    "a norm over all heads": (lambda: small("Olmo2"), "depends on the number of heads"),
    "adapters": (
        lambda: apply_lora(small("Llama"), target_modules=["k_proj"]),
        "k_proj is of class",
    ),
}

# By name of the family in transformers, pooled to one head.
FAMILIES = {
    # Heads 0 and 2 of a block with four would be pooled, and they are no neighbours.
    "mimo_v2_flash": "layers.1.self_attn has 4 heads of keys, and the configuration 2",
    # Each of the blocks that share a projection would train one of its own.
    "zamba": "shares its weight with",
    # What its own code says of one head.
    "diffllama": "kv_heads=1: DiffLlamaForCausalLM refuses it: .* to be even",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_one_head_is_refused(family):
    with pytest.raises(ValueError, match=FAMILIES[family]):
        apply_grouped_query_attention(tiny_model(family), kv_heads=1)


@pytest.mark.parametrize("case", REFUSED)
def test_families_that_are_refused_stay_as_they_are(case):
    build, message = REFUSED[case]
    model = build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        apply_grouped_query_attention(model, kv_heads=2)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert getattr(model.config, "num_key_value_heads", 8) == 8


def test_no_causal_lm():
    with pytest.raises(ValueError, match="no Hugging Face model"):
        apply_grouped_query_attention(nn.Linear(2, 2), kv_heads=1)


def test_other_caches():
    with pytest.raises(ValueError, match="tuple is no cache of transformers"):
        cache_bytes(())


@pytest.mark.gpu
@torch.no_grad()
def test_pooled_on_gpu():
    """The new projections have to be where the others are, and the cache counts their bytes."""
    model = small("Llama").cuda()
    twin = apply_grouped_query_attention(copy.deepcopy(model).cpu(), kv_heads=2)
    apply_grouped_query_attention(model, kv_heads=2)
    output = model(IDS.cuda(), use_cache=True)
    expected = twin(IDS).logits
    assert (output.logits.cpu() - expected).norm() < 1e-3 * expected.norm()
    rows, tokens = IDS.shape
    predicted = predicted_cache_bytes(model, tokens=tokens, batch=rows)
    assert cache_bytes(output.past_key_values) == predicted
