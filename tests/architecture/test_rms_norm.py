import copy

import pytest
import torch
import transformers
from torch import nn

from recipes_lib.architecture.rms_norm import (
    RMSNorm,
    apply_rms_norm,
    plain_rms_norm,
)
from tests.conftest import assert_equal
from tests.small_models import IDS, as_if_trained, small_model

OPT = {"ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0, "pad_token_id": 1}
# Learned positions, Conv1D and a tied table; norms of queries and keys beside those of the stream;
# biases and a norm for two branches.
FAMILIES = {"GPT2": {}, "Phi": {"qk_layernorm": True}, "OPT": OPT}


def small(name, **options):
    """A model whose norms and biases are as random as trained ones, and whose means are not 0."""
    model = small_model(name, **FAMILIES.get(name, {}) | options)
    return as_if_trained(model, mean=0.03)


# --- the module -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_the_formula_forward_and_backward(dtype, tolerance):
    """The mistakes: a sum in 16 bits, an epsilon outside of the root."""
    x = (3 * torch.randn(2, 7, 33) + 1).to(dtype).requires_grad_()
    norm = RMSNorm(33, eps=1e-5, bias=True).to(dtype)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)

    root = (x.detach().double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    exact = x.detach().double() / root * norm.weight.double() + norm.bias.double()
    y = norm(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), exact, rtol=tolerance, atol=tolerance)

    copied = x.detach().clone().requires_grad_()
    plain = plain_rms_norm(copied, norm.weight, 1e-5) + norm.bias
    torch.testing.assert_close(y, plain, rtol=tolerance, atol=tolerance)
    y.float().pow(3).sum().backward()
    got = [x.grad.clone(), norm.weight.grad.clone()]
    norm.zero_grad()
    plain.float().pow(3).sum().backward()
    for gradient, expected in zip(got, [copied.grad, norm.weight.grad]):
        scale = expected.abs().max().item() + 1e-6
        torch.testing.assert_close(
            gradient, expected, rtol=4 * tolerance, atol=4 * tolerance * scale
        )


# --- exact ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_centred_models_compute_the_same_and_load_as_what_they_were(name, tmp_path):
    """A writer that is forgotten, a wrong dimension, a lost bias or an output layer that is centred
    with the embedding: each changes the logits."""
    model = small(name)
    expected = model(IDS).logits
    before = [m for m in model.modules() if isinstance(m, nn.LayerNorm)]
    assert apply_rms_norm(model) is model
    torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-4, atol=1e-4)
    replaced = [m for m in model.modules() if isinstance(m, RMSNorm)]
    left = [m for m in model.modules() if isinstance(m, nn.LayerNorm)]
    assert len(replaced) >= 3 and len(replaced) + len(left) == len(before)
    assert bool(left) == (name == "Phi"), "norms of queries and keys stay"

    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert not any(isinstance(m, RMSNorm) for m in again.modules())
    torch.testing.assert_close(again(IDS).logits, expected, rtol=1e-4, atol=1e-4)


def test_a_tied_output_layer_gets_weights_of_its_own():
    """The mistake: it is centred with the embedding, or tied again by the next resize."""
    model = small("GPT2").train()
    model.transformer.ln_f.requires_grad_(False)
    table = model.transformer.wte.weight.detach().clone()
    assert model.lm_head.weight is model.transformer.wte.weight
    apply_rms_norm(model)
    assert torch.equal(model.lm_head.weight, table)
    assert not model.config.tie_word_embeddings
    model.tie_weights()  # as resize_token_embeddings and others do
    assert torch.equal(model.lm_head.weight, table)
    assert model.training and model.transformer.h[0].ln_1.training
    assert not model.transformer.ln_f.weight.requires_grad


# --- not exact ------------------------------------------------------------------------------------


def test_without_centring_it_is_another_model_that_trains():
    """The mistake: biases that do not train, weights that change, a file that does not load."""
    model = small("Starcoder2")
    before = copy.deepcopy(model.state_dict())
    expected = model(IDS).logits
    apply_rms_norm(model, exact=False)
    assert_equal(model.state_dict(), before)
    assert (model(IDS).logits - expected).abs().max() > 1e-2
    model(IDS, labels=IDS).loss.backward()
    assert model.model.layers[0].input_layernorm.bias.grad.abs().sum() > 0
    loaded = small("Starcoder2")  # its file: build the class, apply again, load
    apply_rms_norm(loaded, exact=False).load_state_dict(before)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    unbiased = apply_rms_norm(small("Starcoder2"), exact=False, keep_bias=False)
    norms = [module for module in unbiased.modules() if isinstance(module, RMSNorm)]
    assert len(norms) == 5 and all(norm.bias is None for norm in norms)


# --- refused --------------------------------------------------------------------------------------


def test_what_cannot_be_centred_stays_as_it_was():
    """The mistake: another model without a word, or weights that stay centred."""
    model = small("OPT", do_layer_norm_before=False)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"apply_rms_norm, and is as it was: the .* is off by"):
        apply_rms_norm(model)
    assert_equal(model.state_dict(), before)


def test_models_without_layer_norm_or_in_16_bits():
    """The mistakes: norms of another formula, and weights that centring rounds."""
    with pytest.raises(ValueError, match="no LayerNorm that reads"):
        apply_rms_norm(small("Cohere"), exact=False)
    with pytest.raises(ValueError, match="is off by"):
        apply_rms_norm(small("GPT2").to(torch.bfloat16))
