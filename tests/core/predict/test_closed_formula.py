"""Which models the closed formula covers, and why not the others."""

import pytest
import torch

from benchmarks.family_predictions import WINDOW, small_model
from recipes_lib.core.model import model_of_shape
from recipes_lib.core.predict.closed_formula import why_no_formula
from tests.conftest import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_it_holds_for_the_families_it_was_read_off(family):
    assert why_no_formula(model_of_shape(family, device="meta"), seq=64) is None


def test_a_window_counts_only_below_the_length_of_the_rows():
    model = small_model("Mistral")
    assert why_no_formula(model, seq=WINDOW - 1) is None
    assert "needs a mask" in why_no_formula(model, seq=WINDOW)


def test_every_block_is_looked_at():
    """DeepSeek-V3 and Jamba begin with a block without experts."""
    model = model_of_shape("tiny-llama", layers=3, device="meta")
    model.model.layers[2].mlp.experts = torch.nn.Linear(1, 1)
    assert why_no_formula(model, seq=8) == "its blocks have experts"
