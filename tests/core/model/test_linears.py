"""Linear layers by name, and other modules in their places."""

import copy

import pytest
import torch
from torch import nn

from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.linears import (
    bytes_per_token,
    layers_to_quantize,
    linear_layers,
    output_layer_name,
    quantized_layers,
    read_by_the_model,
    replace_linears,
)
from recipes_lib.precision.int4 import apply_int4
from recipes_lib.precision.int8 import apply_int8
from tests.small_models import small_model


class Small(nn.Module):
    """What a decoder has: blocks, and an output layer called `head`."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 5)


def test_a_token_reads_the_products_and_not_the_embedding():
    """The mistake: the embedding counts, or a quantized layer as if it still had its weight."""
    model = Small()
    assert bytes_per_token(model) == 4 * (4 * 4 + 4 * 4 + 5 * 4)

    class InOneByte(nn.Module):
        bytes_per_weight = 1.5
        in_features = 4
        out_features = 4

    kept = model.blocks[1]
    replace_linears(model, lambda linear: InOneByte(), names=["blocks.0"])
    assert model.blocks[1] is kept and output_layer_name(model) == "head"
    assert bytes_per_token(model) == 4 * (4 * 4 + 5 * 4) + 1.5 * 4 * 4


def test_a_quantized_model_is_not_saved_as_if_it_were_whole(tmp_path):
    """transformers would write whole numbers without their scales, and load them without a word."""
    model = apply_int4(model_of_shape("tiny-llama", device="cpu"))
    with pytest.raises(ValueError, match="the model is quantized, and from_pretrained would load"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    copied = copy.deepcopy(model)
    copied.load_state_dict(model.state_dict())


# --- which layers, and what has been done to them -------------------------------------------------


def test_the_real_cause_is_named(llama):
    """The mistake: "no linear layer", and advice about GPT-2, for a model that is quantized."""
    apply_int8(llama)
    assert set(quantized_layers(llama).values()) == {"apply_int8"}
    for names in (None, ["model.layers.0.mlp.up_proj"]):
        with pytest.raises(ValueError, match="_proj is quantized already, with apply_int8: give"):
            layers_to_quantize(llama, names)
    assert layers_to_quantize(llama, ["lm_head"]) == ["lm_head"], "a hybrid is none of that"


def test_layers_that_the_model_reads_itself_are_left_out():
    """Mamba multiplies with a weight and does not call its layer: it has no weight in 8 bits."""
    model = small_model("Mamba", state_size=4, time_step_rank=4)
    read = {f"backbone.layers.{block}.mixer.dt_proj" for block in range(2)}
    assert read <= read_by_the_model(model)
    chosen = layers_to_quantize(model, None)
    assert not read & set(chosen)
    assert "backbone.layers.0.mixer.in_proj" in chosen
    assert read_by_the_model(small_model("Llama")) == set()
    assert read_by_the_model(small_model("Bloom", n_layer=2)) == set()  # slices are of old weights


def test_a_router_that_returns_more_than_a_product_is_no_linear_layer():
    """Llama 4 has a subclass of `nn.Linear` that returns two tensors; a plain layer returns one."""
    with torch.device("meta"):
        model = small_model("Llama4Text", num_local_experts=2, intermediate_size_mlp=64)
    assert not [name for name in linear_layers(model) if name.endswith("router")]
    assert "model.layers.0.self_attn.q_proj" in linear_layers(model)
