"""Linear layers by name, and other modules in their places."""

import copy

import pytest
import torch
from torch import nn

from recipes_lib.core.linears import (
    bytes_per_token,
    linear_layers,
    output_layer_name,
    replace_linears,
)
from recipes_lib.core.model import model_of_shape
from recipes_lib.fine_tuning.lora import apply_lora
from recipes_lib.precision.int4 import apply_int4
from recipes_lib.precision.int8 import apply_int8


class Small(nn.Module):
    """What a decoder has: blocks, and an output layer called `head`."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 5)


def test_all_linear_layers_of_a_model(llama):
    layers = linear_layers(llama)
    assert len(layers) == 2 * 7 + 1, "seven projections per block, and the output layer"
    assert layers["model.layers.1.mlp.down_proj"] is llama.model.layers[1].mlp.down_proj
    assert output_layer_name(llama) == "lm_head"
    assert "model.embed_tokens" not in layers


def test_the_output_layer():
    assert output_layer_name(Small()) == "head"
    assert output_layer_name(nn.Linear(2, 2)) is None


def test_the_output_layer_under_adapters(llama):
    """A name without the wrapper's prefix would be no name of this model."""
    adapted = apply_lora(llama)
    assert output_layer_name(adapted) in linear_layers(adapted)


def test_only_the_named_are_replaced():
    model = Small()
    kept = model.blocks[0]

    def make(name, linear):
        assert linear is linear_layers(model)[name]
        return nn.Identity()

    assert replace_linears(model, make, names=["blocks.1", "head"]) is model
    assert model.blocks[0] is kept
    assert type(model.blocks[1]) is nn.Identity
    assert type(model.head) is nn.Identity


def test_one_layer_at_a_time_is_held_twice():
    """A list of all old layers would double the memory of the model while it is changed."""
    model = Small()
    alive = []

    class Watched(nn.Linear):
        def __del__(self):
            alive.remove(self.name)

    for index in range(2):
        model.blocks[index] = Watched(4, 4)
        model.blocks[index].name = index
        alive.append(index)

    def make(name, linear):
        return nn.Identity()

    def last(name, linear):
        assert alive == [1], "the first one is gone"
        return nn.Identity()

    made = iter([make, last])
    replace_linears(model, lambda *given: next(made)(*given), names=["blocks.0", "blocks.1"])
    assert alive == []


def test_an_unknown_name_changes_nothing():
    model = Small()
    before = dict(model.named_modules())
    with pytest.raises(ValueError, match=r"no linear layer embedding: .*linear_layers\(model\)"):
        replace_linears(model, lambda *_: torch.nn.Identity(), names=["head", "embedding"])
    assert dict(model.named_modules()) == before


def test_a_token_reads_the_products_and_not_the_embedding():
    """The mistake: the embedding counts, or a quantized layer as if it still had its weight."""
    model = Small()
    assert bytes_per_token(model) == 4 * (4 * 4 + 4 * 4 + 5 * 4)

    class InOneByte(nn.Module):
        bytes_per_weight = 1.5
        in_features = 4
        out_features = 4

    replace_linears(model, lambda name, linear: InOneByte(), names=["blocks.0"])
    assert bytes_per_token(model) == 4 * (4 * 4 + 5 * 4) + 1.5 * 4 * 4


@pytest.mark.parametrize("apply", [apply_int8, apply_int4])
def test_a_quantized_model_is_not_saved_as_if_it_were_whole(apply, tmp_path):
    """transformers would write whole numbers without their scales, and load them without a word."""
    model = apply(model_of_shape("tiny-llama", device="cpu"))
    with pytest.raises(ValueError, match="the model is quantized, and from_pretrained would load"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    copied = copy.deepcopy(model)
    copied.load_state_dict(model.state_dict())
