"""Bytes of the groups. Their moments against a dry run stand in test_fully_sharded.py."""

import pytest

from recipes_lib.core.model import model_of_shape
from recipes_lib.core.model.sizes import tensor_bytes
from recipes_lib.core.predict.budget import Shape
from recipes_lib.core.predict.plain_step import budget_of
from recipes_lib.parallel._shard_budget import sharded_budget, sharded_groups
from recipes_lib.parallel._sharding import ties_weights


@pytest.mark.parametrize("name", ["tiny-mistral", "tiny-llama", "tiny-gpt2"])
def test_the_groups_hold_every_parameter_once(name):
    """The mistake: a tied weight counts twice, or GPT-2's positions are in no group."""
    model = model_of_shape(name, device="cpu")
    groups = sharded_groups(model, shards=1)  # so there is no padding
    whole = sum(tensor_bytes(parameter) for parameter in model.parameters())
    assert groups.whole.part == groups.whole.gathered == groups.whole.part_gradients == whole
    assert (groups.head.part == 0) == ties_weights(model)


def test_parts_are_padded_to_the_rows_of_the_first():
    """The mistake: what is sent to fill up the last part is not counted."""
    model = model_of_shape("tiny-mistral", device="cpu")
    model.model.embed_tokens.requires_grad_(False)
    groups = sharded_groups(model, shards=3)
    vocabulary, width = model.lm_head.weight.shape  # 128 rows on three ranks: 43, 43, 42
    assert groups.head.part == 4 * 43 * width
    assert groups.head.gathered == groups.head.sent == 3 * groups.head.part
    assert groups.head.gradients == 4 * vocabulary * width
    assert groups.embedding.gradients == groups.embedding.sent == 0


def test_parts_are_an_nth():
    """The mistake: states or gradients of the whole on each rank."""
    model = model_of_shape("llama-3.1-8b", layers=4, device="meta")
    shape = Shape(batch=8, seq=64, ranks=8)
    groups = sharded_groups(model, shards=8)
    budget = sharded_budget(budget_of(model, shape), model, shape, groups)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert budget.weights + budget.states + budget.gradients == pytest.approx(16 * parameters / 8)
