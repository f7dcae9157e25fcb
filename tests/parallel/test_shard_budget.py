"""The moments against a dry run stand in tests/parallel/test_fully_sharded.py."""

import pytest
import torch

from recipes_lib.core.model import model_of_shape
from recipes_lib.core.predict.budget import Shape
from recipes_lib.core.predict.plain_step import budget_of
from recipes_lib.parallel._shard_budget import computing_in, sharded_budget
from recipes_lib.parallel._shard_group_bytes import sharded_groups

SHAPE = Shape(batch=8, seq=64, ranks=8)


def plan(**options):
    model = model_of_shape("llama-3.1-8b", layers=4, device="meta")
    groups = sharded_groups(model, shards=8)
    return groups, sharded_budget(budget_of(model, SHAPE), model, SHAPE, groups, **options)


def test_parts_are_an_nth():
    groups, budget = plan()
    model = model_of_shape("llama-3.1-8b", layers=4, device="meta")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert budget.weights + budget.states + budget.gradients == pytest.approx(16 * parameters / 8)
    assert groups.whole.part == budget.weights


def test_offload_leaves_what_is_gathered():
    _, budget = plan(offload=True)
    assert budget.weights == budget.states == budget.gradients == 0
    assert budget.peak > 0


def test_more_fetched_ahead_and_more_kept_take_more():
    plain = plan()[1].peak
    assert plan(prefetch=3)[1].peak > plain
    assert plan(reshard_after_forward=False)[1].peak > plain
    assert plan(beside_a_block=2**30)[1].one_block == plan()[1].one_block + 2**30


def test_activations_of_another_dtype():
    model = model_of_shape("llama-3.1-8b", layers=2, device="meta")
    half = model_of_shape("llama-3.1-8b", layers=2, device="meta", dtype=torch.bfloat16)
    budget = computing_in(budget_of(model, SHAPE), model, SHAPE, torch.bfloat16)
    expected = budget_of(half, SHAPE)
    assert budget.activations == expected.activations
    assert budget.one_block == expected.one_block
    assert computing_in(budget, model, SHAPE, None) is budget
    with pytest.raises(ValueError, match="that other"):
        computing_in(budget, model, SHAPE, torch.bfloat16)
