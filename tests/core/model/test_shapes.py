"""Shapes have the sizes of their public models."""

from recipes_lib.core.model import load_model, model_of_shape


def test_shape_of_the_default_model():
    """The shape that stands in for SmolLM2 has its parameter count."""
    real = sum(p.numel() for p in load_model(device="cpu").parameters())
    assert (
        sum(p.numel() for p in model_of_shape("smollm2-135m", device="meta").parameters()) == real
    )
