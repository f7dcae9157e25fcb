import copy

import pytest
import torch
import transformers

from recipes_lib.architecture.rope import (
    apply_rope_scaling,
    check_length,
    position_losses,
    predicted_length,
    rope_frequencies,
    rotate,
)
from recipes_lib.core.model import model_of_shape
from recipes_lib.fine_tuning.lora import apply_lora
from tests.small_models import small_model

TRAINED = 64
SHORT = torch.arange(1, 33)[None]
LONG = torch.arange(1, 113)[None]


def small(name):
    """A model that was "trained" on 64 positions."""
    model = model_of_shape(name, device="cpu")
    model.config.max_position_embeddings = TRAINED
    # A new model, because the rotary embedding remembers the length that it was made with.
    fresh = type(model)(copy.deepcopy(model.config))
    fresh.load_state_dict(model.state_dict())
    return fresh.eval()


def inverse_frequencies(kind, factor, *, base, seq_len, head_dim=16):
    """The papers' formulas, in fp64."""
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64)
    plain = base ** -(pairs / head_dim)
    if kind == "linear":
        return plain / factor
    if kind == "dynamic":
        stretch = factor * max(seq_len, TRAINED) / TRAINED - (factor - 1)
        ntk = base * stretch ** (head_dim / (head_dim - 2))
        return ntk ** -(pairs / head_dim)

    def dimension(turns):  # in which pair of dimensions the trained length makes that many turns
        log = torch.log(torch.tensor(TRAINED / (turns * 2 * torch.pi)))
        return head_dim * log / (2 * torch.log(torch.tensor(base)))

    low = max(0, int(dimension(32).floor()))
    high = min(head_dim - 1, int(dimension(1).ceil()))
    ramp = ((torch.arange(head_dim // 2) - low) / (high - low)).clamp(0, 1)
    return plain / factor * ramp + plain * (1 - ramp)


FAMILIES = [
    ("tiny-llama", "linear"),
    ("tiny-llama", "dynamic"),
    ("tiny-llama", "yarn"),
    ("tiny-qwen2", "linear"),
    ("tiny-qwen3", "dynamic"),
    ("tiny-mistral", "yarn"),
]


@pytest.mark.parametrize(("name", "kind"), FAMILIES)
@torch.no_grad()
def test_frequencies_follow_the_formula_and_the_model_uses_them(name, kind):
    plain = small(name)
    scaled = apply_rope_scaling(copy.deepcopy(plain), kind=kind, factor=4.0)
    long_logits = scaled(LONG).logits  # dynamic has recomputed its frequencies now
    base = plain.config.rope_parameters["rope_theta"]
    seq_len = LONG.shape[1]
    expected = inverse_frequencies(kind, 4.0, base=base, seq_len=seq_len)
    of_the_model = scaled.model.rotary_emb.inv_freq.double()
    torch.testing.assert_close(of_the_model, expected, rtol=1e-5, atol=1e-7)
    ours, sharpening = rope_frequencies(
        16, base=base, kind=kind, factor=4.0, trained=TRAINED, seq_len=seq_len
    )
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-7)
    assert sharpening == pytest.approx(scaled.model.rotary_emb.attention_scaling)

    assert (long_logits - plain(LONG).logits).abs().max() > 1e-3
    change_of_short = (scaled(SHORT).logits - plain(SHORT).logits).abs().max()
    if kind == "dynamic":
        assert change_of_short == 0
    else:
        assert change_of_short > 1e-3


@torch.no_grad()
def test_saved_and_loaded(tmp_path):
    scaled = apply_rope_scaling(small("tiny-qwen3"), kind="yarn", factor=4.0)
    assert scaled.config.max_position_embeddings == 256
    scaled.save_pretrained(tmp_path)
    again = type(scaled).from_pretrained(tmp_path).eval()
    assert torch.equal(again(LONG).logits, scaled(LONG).logits)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("heads", "head_dim"), [(3, 16), (1, 2), (2, 10)])
def test_rotation_equals_that_of_transformers(heads, head_dim, dtype, tolerance):
    from transformers.models.llama.modeling_llama import (
        LlamaConfig,
        LlamaRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    config = LlamaConfig(hidden_size=heads * head_dim, num_attention_heads=heads, head_dim=head_dim)
    q, k = torch.randn(2, 2, heads, 37, head_dim, dtype=dtype)
    positions = torch.stack([torch.arange(37), torch.arange(5000, 5037)])
    cos, sin = LlamaRotaryEmbedding(config)(q, positions)
    frequencies, _ = rope_frequencies(head_dim, base=10000.0)
    for ours, theirs in zip((q, k), apply_rotary_pos_emb(q, k, cos, sin)):
        turned = rotate(ours, positions, frequencies)
        torch.testing.assert_close(turned, theirs, rtol=tolerance, atol=tolerance)


def test_only_distances_matter():
    q, k = torch.randn(2, 1, 1, 6, 32, dtype=torch.float64)
    frequencies, _ = rope_frequencies(32, base=10000.0)
    scores = []
    for start in (0, 900):
        positions = torch.arange(start, start + 6)
        scores.append(rotate(q, positions, frequencies) @ rotate(k, positions, frequencies).mT)
    # Angles are fp32: 900 radians to 6e-5.
    torch.testing.assert_close(*scores, rtol=1e-3, atol=1e-3)
    assert (scores[0] - q @ k.mT).abs().max() > 0.1


@torch.no_grad()
def test_losses_along_a_text():
    model = small("tiny-llama")
    losses = position_losses(model, SHORT, window=10)
    assert len(losses) == 4  # 31 predictions
    logits = model(SHORT).logits[0, :-1]
    each = torch.nn.functional.cross_entropy(logits, SHORT[0, 1:], reduction="none")
    expected = torch.stack([part.mean() for part in each.split(10)])
    torch.testing.assert_close(torch.tensor(losses), expected)
    with pytest.raises(ValueError, match="window=0"):
        position_losses(model, SHORT, window=0)
    for row in (SHORT[0], SHORT[:, :1], SHORT.repeat(2, 1)):
        with pytest.raises(ValueError, match="one row"):
            position_losses(model, row, window=5)


def test_losses_of_a_model_that_caps_its_logits_or_has_adapters():
    model = model_of_shape("tiny-gemma2", device="cpu").eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(200)  # so that the cap matters
    expected = model(input_ids=SHORT, labels=SHORT).loss.item()
    assert position_losses(model, SHORT, window=31) == [pytest.approx(expected, rel=1e-5)]
    adapted = apply_lora(model)
    assert position_losses(adapted, SHORT, window=31) == [pytest.approx(expected, rel=1e-5)]
    assert apply_rope_scaling(adapted, kind="linear", factor=2) is adapted
    assert position_losses(adapted, SHORT, window=31) != [pytest.approx(expected, rel=1e-5)]


def test_losses_of_a_model_that_scales_its_logits():
    """Granite divides its logits by a factor of the configuration."""
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "logits_scaling": 8.0}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.GraniteForCausalLM(transformers.GraniteConfig(**sizes)).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(50)  # so that the factor matters
    expected = model(input_ids=SHORT, labels=SHORT).loss.item()
    assert position_losses(model, SHORT, window=31) == [pytest.approx(expected, rel=1e-5)]


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
def test_lengths_that_are_not_meant_are_refused(kind):
    """dynamic keeps the trained length in its configuration, the others multiply it."""
    model = small("tiny-qwen3")
    assert predicted_length(model, factor=4.0) == 256
    assert check_length(model, 64) == 64
    remedy = r"remedy: apply_rope_scaling\(model, kind='yarn', factor=2\)$"
    with pytest.raises(ValueError, match=rf"end at 64; {remedy}"):
        check_length(model, 65)
    apply_rope_scaling(model, kind=kind, factor=4.0)
    assert check_length(model, 256) == 256
    remedy = r".*factor=5\) on the model as it was before its scaling"
    with pytest.raises(ValueError, match=rf"end at 256; {remedy}"):
        check_length(model, 257)


def test_a_table_of_positions_has_no_remedy():
    with pytest.raises(ValueError, match=r"end at 1,024; remedy: none$"):
        check_length(model_of_shape("tiny-gpt2", device="cpu"), 1025)


def test_bad_input():
    model = small("tiny-llama")
    with pytest.raises(ValueError, match="choose one of linear, dynamic, yarn"):
        apply_rope_scaling(model, kind="magic", factor=4)
    with pytest.raises(ValueError, match="factor=1: give a finite number above 1"):
        apply_rope_scaling(model, kind="yarn", factor=1)
    with pytest.raises(ValueError, match="choose one of default, linear"):
        rope_frequencies(16, base=1e4, kind="magic")
    with pytest.raises(ValueError, match="give an even head_dim"):
        rope_frequencies(15, base=1e4)
    with pytest.raises(ValueError, match="give the trained length"):
        rope_frequencies(16, base=1e4, kind="yarn", factor=2)


def test_models_that_cannot_be_stretched_are_refused():
    with pytest.raises(ValueError, match="no single rotary embedding"):
        apply_rope_scaling(model_of_shape("tiny-gpt2", device="cpu"), kind="yarn", factor=4)
    model = apply_rope_scaling(small("tiny-llama"), kind="yarn", factor=4)
    with pytest.raises(ValueError, match="scaled already"):
        apply_rope_scaling(model, kind="yarn", factor=4)
    assert model.config.max_position_embeddings == 4 * TRAINED


@pytest.mark.parametrize(
    ("family", "kind", "options", "message"),
    [
        ("Phi3", "linear", {}, "could not be loaded"),
        ("Phi3", "yarn", {}, "could not be loaded"),
        ("Falcon", "yarn", {"alibi": True}, "does not read its rotary embedding"),
        ("Falcon", "dynamic", {"alibi": True}, "does not read its rotary embedding"),
    ],
)
def test_scaling_without_effect_or_without_a_way_back_is_refused(family, kind, options, message):
    """Phi-3 was saved and could not be loaded; ALiBi was scaled, and nothing happened."""
    model = small_model(family, num_key_value_heads=4, **options)
    rotary = model.base_model.rotary_emb
    config = str(model.config)
    with pytest.raises(ValueError, match=message) as refusal:
        apply_rope_scaling(model, kind=kind, factor=2)
    assert "\n" not in str(refusal.value)
    assert str(model.config) == config
    assert model.base_model.rotary_emb is rotary


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
@torch.no_grad()
def test_a_configuration_that_leaves_the_width_of_a_head_open(kind, tmp_path):
    """Mixtral ended in a TypeError of transformers, with a configuration that was scaled."""
    model = small_model("Mixtral", num_key_value_heads=2, num_local_experts=2, head_dim=None)
    apply_rope_scaling(model, kind=kind, factor=2)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(again(LONG).logits, model(LONG).logits)


def test_a_rotary_embedding_that_cannot_be_made_leaves_the_model_as_it_was(monkeypatch):
    """An error in the middle of the change would leave a configuration that is not the model's."""
    model = small("tiny-llama")
    config = str(model.config)

    def broken(self, config):
        raise TypeError("no width")

    monkeypatch.setattr(type(model.model.rotary_emb), "__init__", broken)
    with pytest.raises(ValueError, match=r"cannot be made with rope_type='yarn' \(TypeError: no"):
        apply_rope_scaling(model, kind="yarn", factor=2)
    assert str(model.config) == config
