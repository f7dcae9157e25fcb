import copy

import pytest
import torch

from recipes_lib.architecture.rope import apply_rope_scaling, estimate_rope_scaling
from recipes_lib.core.model import model_of_shape

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
        ntk = base * (factor * max(seq_len, length) / length - (factor - 1)) ** (head_dim / (head_dim - 2))
        return ntk ** -(pairs / head_dim)

    def dimension(turns):  # in which pair of dimensions the trained length makes that many turns
        return head_dim * torch.log(torch.tensor(length / (turns * 2 * torch.pi))) / (2 * torch.log(torch.tensor(base)))

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
    expected = inverse_frequencies(kind, 4.0, base=plain.config.rope_parameters["rope_theta"], seq_len=seq_len)
    torch.testing.assert_close(scaled.model.rotary_emb.inv_freq.double(), expected, rtol=1e-5, atol=1e-7)
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


def test_estimate():
    assert estimate_rope_scaling(small("tiny-qwen3"), factor=4.0) == 256


def test_bad_input():
    model = small("tiny-llama")
    with pytest.raises(ValueError, match="choose one of linear, dynamic, yarn"):
        apply_rope_scaling(model, kind="magic", factor=4)
    with pytest.raises(ValueError, match="a factor above 1"):
        apply_rope_scaling(model, kind="yarn", factor=1)
    with pytest.raises(ValueError, match="no single rotary embedding"):
        apply_rope_scaling(model_of_shape("tiny-gpt2", device="cpu"), kind="yarn", factor=4)
    apply_rope_scaling(model, kind="yarn", factor=4)
    with pytest.raises(ValueError, match="scaled already"):
        apply_rope_scaling(model, kind="yarn", factor=4)
