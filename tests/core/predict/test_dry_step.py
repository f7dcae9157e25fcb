"""Predictions where no formula holds, against the bytes that a step really takes."""

import pytest

from benchmarks.family_predictions import small_model
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.predict.budget import Shape
from recipes_lib.core.predict.dry_step import dry_step
from recipes_lib.core.predict.plain_step import budget_of, dry_budget


def test_it_agrees_with_the_formula():
    model = model_of_shape("tiny-llama", layers=4, device="meta")
    shape = Shape(batch=4, seq=64)
    counted = dry_budget(model, shape, reason="a test asks for it")
    assert counted.peak == pytest.approx(budget_of(model, shape).peak, rel=0.02)


def test_the_model_stays_as_it_is():
    """The step runs on a copy: no gradient, no hook and no tensor of the model itself."""
    model = small_model("Phi3")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    dry_step(model, rows=1, length=8)
    for name, parameter in model.named_parameters():
        assert parameter.grad is None and parameter.equal(before[name])
    assert not any(module._forward_hooks for module in model.modules())
