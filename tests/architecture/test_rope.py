import copy

import pytest
import torch

from recipes_lib.architecture.rope import (
    apply_rope_scaling,
    check_length,
    estimate_rope_scaling,
    position_losses,
    rope_frequencies,
    rotate,
)
from recipes_lib.core.model import model_of_shape
from recipes_lib.fine_tuning.lora import apply_lora

SHORT, LONG = torch.arange(1, 33)[None], torch.arange(1, 113)[None]  # the trained length is 64


def small(shape):
    model = model_of_shape(shape, device="cpu")
    model.config.max_position_embeddings = 64
    config = copy.deepcopy(model.config)
    fresh = type(model)(config)  # the rotary embedding remembers the length that it was made with
    fresh.load_state_dict(model.state_dict())
    return fresh.eval()


def inverse_frequencies(kind, factor, head_dim=16, base=10000.0, length=64, seq_len=64):
    """The papers' formulas, in fp64."""
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64)
    plain = base ** -(pairs / head_dim)
    if kind == "linear":
        return plain / factor
    if kind == "dynamic":
        ntk = base * (factor * max(seq_len, length) / length - (factor - 1)) ** (
            head_dim / (head_dim - 2)
        )
        return ntk ** -(pairs / head_dim)

    def dimension(turns):  # in which pair of dimensions the trained length makes that many turns
        return (
            head_dim
            * torch.log(torch.tensor(length / (turns * 2 * torch.pi)))
            / (2 * torch.log(torch.tensor(base)))
        )

    low, high = max(0, int(dimension(32).floor())), min(head_dim - 1, int(dimension(1).ceil()))
    ramp = ((torch.arange(head_dim // 2) - low) / (high - low)).clamp(0, 1)
    return plain / factor * ramp + plain * (1 - ramp)


@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-mistral"])
@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
@torch.no_grad()
def test_frequencies_follow_the_formula_and_the_model_uses_them(shape, kind):
    plain = small(shape)
    scaled = apply_rope_scaling(copy.deepcopy(plain), kind=kind, factor=4.0)
    scaled(LONG)
    seq_len = LONG.shape[1] if kind == "dynamic" else 64
    expected = inverse_frequencies(
        kind, 4.0, base=plain.config.rope_parameters["rope_theta"], seq_len=seq_len
    )
    torch.testing.assert_close(
        scaled.model.rotary_emb.inv_freq.double(), expected, rtol=1e-5, atol=1e-7
    )
    base = plain.config.rope_parameters["rope_theta"]
    ours, sharpen = rope_frequencies(
        16, base=base, kind=kind, factor=4.0, trained=64, seq_len=seq_len
    )
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-7)
    assert sharpen == pytest.approx(scaled.model.rotary_emb.attention_scaling)
    assert (scaled(LONG).logits - plain(LONG).logits).abs().max() > 1e-3
    short = (scaled(SHORT).logits - plain(SHORT).logits).abs().max()
    assert short == 0 if kind == "dynamic" else short > 1e-3, "dynamic leaves short texts alone"


@torch.no_grad()
def test_saved_and_loaded(tmp_path):
    scaled = apply_rope_scaling(small("tiny-qwen3"), kind="yarn", factor=4.0)
    assert scaled.config.max_position_embeddings == 256
    scaled.save_pretrained(tmp_path)
    again = type(scaled).from_pretrained(tmp_path).eval()
    assert torch.equal(again(LONG).logits, scaled(LONG).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "head_dim"), [(3, 16), (1, 2), (2, 10)])
def test_rotation_equals_that_of_transformers(heads, head_dim, dtype):
    from transformers.models.llama.modeling_llama import (
        LlamaConfig,
        LlamaRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    sizes = {"hidden_size": heads * head_dim, "num_attention_heads": heads, "head_dim": head_dim}
    q, k = torch.randn(2, 2, heads, 37, head_dim, dtype=dtype)
    positions = torch.stack([torch.arange(37), torch.arange(5000, 5037)])
    cos, sin = LlamaRotaryEmbedding(LlamaConfig(**sizes))(q, positions)
    frequencies, _ = rope_frequencies(head_dim, base=10000.0)
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    )
    for ours, theirs in zip((q, k), apply_rotary_pos_emb(q, k, cos, sin)):
        torch.testing.assert_close(rotate(ours, positions, frequencies), theirs, **tolerance)


def test_only_distances_matter():
    q, k = torch.randn(2, 1, 1, 6, 32, dtype=torch.float64)
    frequencies, _ = rope_frequencies(32, base=10000.0)
    scores = []
    for start in (0, 900):
        positions = torch.arange(start, start + 6)
        scores.append(rotate(q, positions, frequencies) @ rotate(k, positions, frequencies).mT)
    torch.testing.assert_close(
        *scores, rtol=1e-3, atol=1e-3
    )  # angles are fp32: 900 radians to 6e-5
    assert (scores[0] - q @ k.mT).abs().max() > 0.1


def test_losses_along_a_text():
    model = small("tiny-llama")
    losses = position_losses(model, SHORT, window=10)
    assert len(losses) == 4  # 31 predictions
    with torch.no_grad():
        logits = model(SHORT).logits[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, SHORT[0, 1:], reduction="none")
    torch.testing.assert_close(
        torch.tensor(losses), torch.stack([p.mean() for p in expected.split(10)])
    )
    for row, window in ((SHORT, 0), (SHORT[0], 5), (SHORT[:, :1], 5), (SHORT.repeat(2, 1), 5)):
        with pytest.raises(ValueError, match="one row"):
            position_losses(model, row, window=window)


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
    model.config.logits_scaling = 8.0
    with pytest.raises(ValueError, match="scales its logits"):
        position_losses(model, SHORT, window=31)


def test_estimate():
    assert estimate_rope_scaling(small("tiny-qwen3"), factor=4.0) == 256


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
def test_lengths_that_are_not_meant_are_refused(kind):
    model = small("tiny-qwen3")
    assert check_length(model, 64) == 64
    with pytest.raises(
        ValueError, match=r"end at 64; remedy: apply_rope_scaling\(model, kind='yarn', factor=2\)"
    ):
        check_length(model, 65)
    apply_rope_scaling(model, kind=kind, factor=4.0)
    assert check_length(model, 256) == 256
    with pytest.raises(
        ValueError, match=r"end at 256; .*factor=5\) on the model as it was before its scaling"
    ):
        check_length(model, 257)
    with pytest.raises(ValueError, match="end at 1,024; remedy: none"):
        check_length(model_of_shape("tiny-gpt2", device="cpu"), 1025)


def test_bad_input():
    model = small("tiny-llama")
    with pytest.raises(ValueError, match="choose one of linear, dynamic, yarn"):
        apply_rope_scaling(model, kind="magic", factor=4)
    with pytest.raises(ValueError, match="give an even head_dim"):
        rope_frequencies(15, base=1e4)
    with pytest.raises(ValueError, match="and for dynamic and yarn the trained length"):
        rope_frequencies(16, base=1e4, kind="yarn", factor=2)
    with pytest.raises(ValueError, match="a factor above 1"):
        apply_rope_scaling(model, kind="yarn", factor=1)
    with pytest.raises(ValueError, match="no single rotary embedding"):
        apply_rope_scaling(model_of_shape("tiny-gpt2", device="cpu"), kind="yarn", factor=4)
    apply_rope_scaling(model, kind="yarn", factor=4)
    with pytest.raises(ValueError, match="scaled already"):
        apply_rope_scaling(model, kind="yarn", factor=4)
