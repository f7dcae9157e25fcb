"""Shapes have the sizes of their public models."""

import pytest

from recipes_lib.core.model import load_model, model_of_shape
from recipes_lib.core.model.causal_lm import decoder_blocks


def test_shapes():
    assert len(decoder_blocks(model_of_shape("tiny-llama", layers=5, device="meta"))) == 5
    with pytest.raises(ValueError, match="one of smollm2-135m"):
        model_of_shape("llama-9")


def test_shape_of_the_default_model():
    """The shape that stands in for SmolLM2 has its parameter count."""
    real = sum(p.numel() for p in load_model(device="cpu").parameters())
    assert (
        sum(p.numel() for p in model_of_shape("smollm2-135m", device="meta").parameters()) == real
    )
