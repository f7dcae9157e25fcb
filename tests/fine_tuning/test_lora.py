import warnings

import pytest

from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.bytes_of_tensors import weight_bytes
from recipes_lib.fine_tuning.lora import (
    apply_lora,
    lora_parameters,
    target_linears,
)
from tests.small_models import small_model

LLAMA_AND_GPT2 = ["tiny-llama", "tiny-gpt2"]  # GPT-2's weights are transposed


@pytest.fixture(params=LLAMA_AND_GPT2)
def model(request):
    return model_of_shape(request.param, device="cpu")


def adapters_by_name(model):
    """Adapted layers, by the names that they have in the base."""
    return {
        name.removeprefix("base_model.model."): module
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }


# --- what it does ---------------------------------------------------------------------------------


def test_parameters_are_predicted_exactly(model):
    """The mistake: the output layer is adapted as well, or peft warns of transposed weights."""
    expected = lora_parameters(model, rank=5)
    before = weight_bytes(model)
    head = model.get_output_embeddings()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = apply_lora(model, rank=5, alpha=1)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == expected
    assert weight_bytes(model) == before + 4 * expected
    assert model.get_output_embeddings() is head


def test_targets_by_name(llama):
    """The mistake: "proj" is taken for the end of "q_proj"."""
    one = target_linears(llama, target_modules=["1.self_attn.q_proj"])
    assert list(one) == ["model.layers.1.self_attn.q_proj"]
    with pytest.raises(ValueError, match=r"target_modules='proj': choose one of .*q_proj"):
        apply_lora(llama, target_modules="proj")


# --- guards ---------------------------------------------------------------------------------------


def test_adapters_on_adapters(llama):
    """The mistake: peft puts a second adapter on top, and only one of both trains."""
    with pytest.raises(ValueError, match="has adapters already"):
        apply_lora(apply_lora(llama))


def test_experts_are_not_skipped_silently():
    """The mistake: "all-linear" adapts a tenth of a mixture; or the router is adapted."""
    experts = {"num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 16}
    heads = {"head_dim": 16, "num_key_value_heads": 2}
    model = small_model("Qwen3Moe", num_experts_per_tok=2, **heads, **experts)
    with pytest.raises(ValueError, match=r"does not reach the experts.*target_modules='attention'"):
        apply_lora(model)
    with pytest.raises(ValueError, match="target_modules='gate': choose one of"):
        apply_lora(model, target_modules="gate")
    model = apply_lora(model, rank=2, target_modules="attention")
    assert all(".self_attn." in name for name in adapters_by_name(model))


def test_layers_that_a_state_space_model_does_not_call():
    """The mistake: a kernel reads the weights of its layers, and adapters on them learn nothing."""
    model = small_model("Mamba", state_size=8)
    for wrong in ("all-linear", ["in_proj", "dt_proj"]):
        with pytest.raises(ValueError, match=r"reads .*dt_proj.*target_modules=\['in_proj'\]"):
            apply_lora(model, target_modules=wrong)
    with pytest.raises(ValueError, match="use LoRA on others"):
        apply_lora(model, target_modules="attention")
    apply_lora(model, target_modules=["in_proj"])


def test_layers_that_share_a_weight(llama):
    """The mistake: two adapters of one weight, which a merge would both add to both layers."""
    first, second = (layer.mlp for layer in llama.model.layers)
    second.up_proj.weight = first.up_proj.weight
    with pytest.raises(ValueError, match=r"reads \['up_proj'\] .*in several places"):
        apply_lora(llama)
    apply_lora(llama, target_modules=["down_proj"])
