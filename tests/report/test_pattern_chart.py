"""Attention patterns as pictures."""

import pytest
import torch

from recipes_lib.report.pattern_chart import pattern_chart


def test_queries_go_down_and_keys_to_the_right():
    """Catches a transposed mask, and a share of all pairs in place of the causal ones."""
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    near = causal & ~torch.ones(4, 4, dtype=torch.bool).tril(-2)  # itself, and the one before
    figure = pattern_chart({"full": causal, "window of 2": near})
    full, window = figure.axes
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["full", "window of 2"]
    drawn = window.images[0].get_array()
    assert drawn[3].tolist() == [0, 0, 1, 1]
    assert drawn.mask[0].tolist() == [False, True, True, True]
    assert full.get_xlabel() == "100% of the pairs"
    assert window.get_xlabel() == "70% of the pairs"  # 7 of 10


def test_nothing_to_draw():
    with pytest.raises(ValueError, match="nothing to draw"):
        pattern_chart({})
