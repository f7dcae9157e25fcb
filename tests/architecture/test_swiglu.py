import copy

import pytest
import torch
import transformers
from torch import nn

from recipes_lib.architecture.swiglu import (
    SwiGLU,
    apply_swiglu,
    matched_width,
    plain_swiglu,
    predicted_parameters,
)
from recipes_lib.core.model import model_of_shape
from tests.families.configs import tiny_model

IDS = torch.arange(1, 25).view(2, 12)

SIZES = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES = {
    "GPT2": {"n_inner": 192},
    "GPTNeoX": {},
    "Phi": {},
    "Starcoder2": {"use_bias": False},
    "Falcon": {"ffn_hidden_size": 192},
    "GPTJ": {"n_inner": 192, "rotary_dim": 8},
}


def small(family, **options):
    config_class = getattr(transformers, f"{family}Config")
    config = config_class(**SIZES | FAMILIES.get(family, {}) | options)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("shape", [(2, 5, 12), (1, 12), (12,)])
def test_the_formula_forward_and_backward(shape, dtype, tolerance):
    x = torch.randn(shape).to(dtype)
    module = SwiGLU(12, 7).to(dtype)
    weights = [module.gate_proj.weight, module.up_proj.weight, module.down_proj.weight]
    exact = [weight.detach().double().requires_grad_() for weight in weights]
    y = module(x)
    expected = plain_swiglu(x.double(), *exact)
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
    y.float().pow(2).sum().backward()
    expected.pow(2).sum().backward()
    for weight, reference in zip(weights, exact):
        scale = reference.grad.abs().max().item()
        torch.testing.assert_close(
            weight.grad.double(), reference.grad, rtol=tolerance, atol=4 * tolerance * scale
        )


def test_equal_to_that_of_llama():
    llama = model_of_shape("tiny-llama", device="cpu").model.layers[0].mlp
    ours = SwiGLU(64, 160)
    ours.load_state_dict(llama.state_dict())
    x = torch.randn(2, 3, 64)
    assert torch.equal(ours(x), llama(x))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("hidden", "width"), [(768, 3072), (48, 192), (64, 100), (3, 1)])
def test_two_thirds_of_the_width(hidden, width, bias):
    """No other width has a number of weights that is nearer; GPT-2's 3072 becomes 2048."""
    wanted = predicted_parameters(hidden, width, gated=False, bias=bias)

    def distance(candidate):
        return abs(predicted_parameters(hidden, candidate, gated=True, bias=bias) - wanted)

    assert matched_width(hidden, width, bias=bias) == min(range(1, width + 2), key=distance)
    if not bias and width % 3 == 0:
        assert distance(2 * width // 3) == 0
    rounded = matched_width(hidden, width, bias=bias, multiple_of=64)
    assert rounded == min(range(64, width + 128, 64), key=distance)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_keep_their_size_and_train(family):
    model = small(family)
    before = count(model)
    spread = {name: p.std() for name, p in model.named_parameters() if "mlp" in name}
    assert apply_swiglu(model) is model
    modules = [module for module in model.modules() if isinstance(module, SwiGLU)]
    assert len(modules) == 2
    one_column = 3 * 48 + 2  # of the middle, with its biases
    assert abs(count(model) - before) <= 2 * one_column
    largest = max(spread.values()).item()
    assert modules[0].gate_proj.weight.std().item() == pytest.approx(largest, rel=0.1)

    model(IDS, labels=IDS).loss.backward()
    gradients = [p.grad.abs().sum() for module in modules for p in module.parameters()]
    assert min(gradients) > 0
    # The block really runs it: another gate gives other logits.
    expected = model(IDS).logits
    with torch.no_grad():
        modules[0].gate_proj.weight.mul_(2)
    assert (model(IDS).logits - expected).abs().max() > 1e-6


def test_predicted_parameters_are_those_of_the_module():
    for bias in (False, True):
        made = SwiGLU(12, 7, bias=bias)
        assert count(made) == predicted_parameters(12, 7, gated=True, bias=bias)
    plain = nn.Sequential(nn.Linear(12, 7), nn.GELU(), nn.Linear(7, 12))
    assert count(plain) == predicted_parameters(12, 7, gated=False, bias=True)


def test_dropout_dtype_and_mode_stay():
    model = small("GPT2", resid_pdrop=0.25).to(torch.bfloat16).train()
    mlp = apply_swiglu(model, width=64).transformer.h[0].mlp
    assert mlp.dropout.p == 0.25 and mlp.training
    x = torch.ones(1, 48, dtype=torch.bfloat16)
    assert 0 < (mlp(x) == 0).sum() < 48, "a quarter of the output is dropped"
    assert mlp.gate_proj.weight.dtype == torch.bfloat16
    assert mlp.gate_proj.out_features == 64
    starcoder = apply_swiglu(small("Starcoder2", residual_dropout=0.5))
    assert starcoder.model.layers[1].mlp.dropout.p == 0.5


def test_a_state_dict_loads_into_a_model_that_is_built_the_same_way():
    torch.manual_seed(1)
    model = apply_swiglu(small("GPT2"))
    again = apply_swiglu(small("GPT2"))
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_refused(tmp_path):
    small("GPT2").save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    before = copy.deepcopy(loaded.state_dict())
    with pytest.raises(ValueError, match="discard_trained=True"):
        apply_swiglu(loaded)
    assert all(torch.equal(before[name], tensor) for name, tensor in loaded.state_dict().items())
    apply_swiglu(loaded, discard_trained=True)
    llama = model_of_shape("tiny-llama", device="cpu")
    opt = small("OPT", ffn_dim=96, word_embed_proj_dim=48, pad_token_id=1)
    bloom = tiny_model("bloom")  # its MLP is given the residual, which a SwiGLU would not add
    for model in (llama, opt, bloom, loaded):
        with pytest.raises(ValueError, match="no MLP of two projections"):
            apply_swiglu(model, discard_trained=True)
    with pytest.raises(ValueError, match="width=0"):
        apply_swiglu(small("GPT2"), width=0)
    with pytest.raises(ValueError, match="multiple_of=0"):
        apply_swiglu(small("GPT2"), multiple_of=0)


@pytest.mark.gpu
@torch.no_grad()
def test_fresh_weights_are_on_the_gpu():
    """They are drawn on the CPU, and moved to where the layer was."""
    model = apply_swiglu(small("GPT2").cuda().half())
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}
    mlp = model.transformer.h[0].mlp
    x = torch.randn(3, 48, device="cuda", dtype=torch.float16)
    weights = [linear.weight.float() for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
    biases = [linear.bias for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
    assert not any(bias.any() for bias in biases), "fresh ones are zero"
    expected = plain_swiglu(x.float(), *weights)
    assert (mlp.eval()(x).float() - expected).norm() < 0.01 * expected.norm()
