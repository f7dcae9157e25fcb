import copy

import pytest
import torch
import transformers

from recipes_lib.architecture.swiglu import (
    SwiGLU,
    apply_swiglu,
    matched_width,
    predicted_parameters,
)
from recipes_lib.core.model import model_of_shape
from tests.families.configs import tiny_model
from tests.small_models import IDS, small_model

# Conv1D; two projections with another name of the block's part; no biases.
FAMILIES = {"GPT2": {"n_inner": 192}, "GPTNeoX": {}, "Starcoder2": {"use_bias": False}}


def small(family, **options):
    settings = {"hidden_size": 48, "intermediate_size": 192, "num_key_value_heads": 4}
    return small_model(family, **settings | FAMILIES.get(family, {}) | options)


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("hidden", "width"), [(64, 100), (3, 1)])
def test_two_thirds_of_the_width(hidden, width, bias):
    """The mistake: a width beside the one whose number of weights is nearest."""
    wanted = predicted_parameters(hidden, width, gated=False, bias=bias)

    def distance(candidate):
        return abs(predicted_parameters(hidden, candidate, gated=True, bias=bias) - wanted)

    assert matched_width(hidden, width, bias=bias) == min(range(1, width + 2), key=distance)
    made = SwiGLU(hidden, width, bias=bias)
    assert count(made) == predicted_parameters(hidden, width, gated=True, bias=bias)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_keep_their_size_and_train(family):
    """The mistakes: an attention that is taken for an MLP, weights of another spread, a file that
    does not load into a model that is built the same way."""
    model = small(family)
    before = count(model)
    spread = max(p.std() for name, p in model.named_parameters() if "mlp" in name).item()
    assert apply_swiglu(model) is model
    modules = [module for module in model.modules() if isinstance(module, SwiGLU)]
    assert len(modules) == 2
    one_column = 3 * 48 + 2  # of the middle, with its biases
    assert abs(count(model) - before) <= 2 * one_column
    assert modules[0].gate_proj.weight.std().item() == pytest.approx(spread, rel=0.1)
    model(IDS, labels=IDS).loss.backward()
    gradients = [p.grad.abs().sum() for module in modules for p in module.parameters()]
    assert min(gradients) > 0
    again = apply_swiglu(small(family))
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_refused(tmp_path):
    """The mistakes: trained weights that are lost without a word, a residual that nobody adds."""
    small("GPT2").save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="starts with fresh weights"):
        apply_swiglu(loaded)
    with pytest.raises(ValueError, match="no MLP of two projections"):
        apply_swiglu(model_of_shape("tiny-llama", device="cpu"))
    with pytest.raises(ValueError, match="takes 2 positional arguments but 3"):
        apply_swiglu(tiny_model("bloom"))  # whose MLP is given the residual
