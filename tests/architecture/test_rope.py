import copy

import pytest
import torch

from recipes_lib.architecture.rope import (
    apply_rope_scaling,
    check_length,
    rotate,
)
from recipes_lib.core.model import model_of_shape
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


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
@torch.no_grad()
def test_the_model_and_its_file_are_scaled(kind, tmp_path):
    """The mistake: a scaling that changes nothing, or a file that loads without it."""
    plain = small("tiny-llama")
    scaled = apply_rope_scaling(copy.deepcopy(plain), kind=kind, factor=4.0)
    long_logits = scaled(LONG).logits  # dynamic has recomputed its frequencies now
    assert (long_logits - plain(LONG).logits).abs().max() > 1e-3
    changed = (scaled(SHORT).logits - plain(SHORT).logits).abs().max()
    assert (changed > 1e-3) == (kind != "dynamic"), "dynamic leaves short texts alone"
    scaled.save_pretrained(tmp_path)
    again = type(scaled).from_pretrained(tmp_path).eval()
    assert torch.equal(again(LONG).logits, long_logits)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_rotation_equals_that_of_transformers(dtype, tolerance):
    """The mistakes: pairs of neighbours in place of halves, angles in 16 bits."""
    from transformers.models.llama.modeling_llama import (
        LlamaConfig,
        LlamaRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    config = LlamaConfig(hidden_size=48, num_attention_heads=3)
    q, k = torch.randn(2, 2, 3, 37, 16, dtype=dtype)
    positions = torch.stack([torch.arange(37), torch.arange(5000, 5037)])
    cos, sin = LlamaRotaryEmbedding(config)(q, positions)
    # Rounded as in transformers: 6e-8 of 5,000 radians is not nothing.
    frequencies = 1 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    for ours, theirs in zip((q, k), apply_rotary_pos_emb(q, k, cos, sin)):
        turned = rotate(ours, positions, frequencies)
        torch.testing.assert_close(turned, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["dynamic", "yarn"])
def test_lengths_that_are_not_meant_are_refused(kind):
    """dynamic keeps the trained length in its configuration, the others multiply it."""
    model = small("tiny-qwen3")
    assert check_length(model, 64) == 64
    remedy = r"remedy: apply_rope_scaling\(model, kind='yarn', factor=2\)$"
    with pytest.raises(ValueError, match=rf"end at 64; {remedy}"):
        check_length(model, 65)
    apply_rope_scaling(model, kind=kind, factor=4.0)
    assert check_length(model, 256) == 256
    remedy = r".*factor=5\) on the model as it was before its scaling"
    with pytest.raises(ValueError, match=rf"end at 256; {remedy}"):
        check_length(model, 257)
    with pytest.raises(ValueError, match=r"end at 1,024; remedy: none$"):
        check_length(model_of_shape("tiny-gpt2", device="cpu"), 1025)


def test_models_that_cannot_be_stretched_are_refused():
    """The mistake: a second scaling on top, which reads the length of the first."""
    with pytest.raises(ValueError, match="no single rotary embedding"):
        apply_rope_scaling(model_of_shape("tiny-gpt2", device="cpu"), kind="yarn", factor=4)
    model = apply_rope_scaling(small("tiny-llama"), kind="yarn", factor=4)
    with pytest.raises(ValueError, match="scaled already"):
        apply_rope_scaling(model, kind="yarn", factor=4)
    assert model.config.max_position_embeddings == 4 * TRAINED
    with pytest.raises(ValueError, match="factor=1: give a finite number above 1"):
        apply_rope_scaling(small("tiny-llama"), kind="yarn", factor=1)


@pytest.mark.parametrize(
    ("family", "kind", "options", "message"),
    [
        ("Phi3", "yarn", {}, "must be one of"),
        ("Falcon", "dynamic", {"alibi": True}, "no number has changed"),
    ],
)
def test_scaling_without_effect_or_without_a_way_back_is_refused(family, kind, options, message):
    """Phi-3 would be saved and could not be loaded; ALiBi would be scaled, and nothing happens."""
    model = small_model(family, num_key_value_heads=4, **options)
    rotary = model.base_model.rotary_emb
    config = str(model.config)
    with pytest.raises(ValueError, match=message):
        apply_rope_scaling(model, kind=kind, factor=2)
    assert str(model.config) == config
    assert model.base_model.rotary_emb is rotary
