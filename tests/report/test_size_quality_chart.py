"""Bytes per weight against perplexity, read back from the figure."""

import pytest

from recipes_lib.report.size_quality_chart import Variant, size_quality_chart
from tests.drawn import assert_apart, boxes_of, texts

VARIANTS = [
    Variant("fp32", 4.0, 7.99),
    Variant("fp16", 2.0, 8.00),
    Variant("int8", 1.01, 8.04),
    Variant("int8, dynamic", 1.01, 8.18),
    Variant("int4, rounded", 0.63, 8.60),
    Variant("int4, AWQ", 0.63, 8.26),
]


def test_size_quality_chart_names_every_point():
    (axes,) = size_quality_chart(VARIANTS).axes
    names = {f"{point.name}  {point.perplexity:.2f}" for point in VARIANTS}
    assert names <= set(texts(axes))
    assert_apart(boxes_of(axes, names))
    assert axes.get_yscale() == "linear"
    broken = [*VARIANTS, Variant("int4, one scale", 0.5, 4000.0)]
    (axes,) = size_quality_chart(broken).axes
    assert axes.get_yscale() == "log", "one broken variant would press all others into a line"


@pytest.mark.parametrize("wrong", [0.0, float("nan"), -1.0])
def test_points_that_are_none(wrong):
    with pytest.raises(ValueError, match="give a finite number above 0"):
        Variant("x", 1.0, wrong)


def test_nothing_to_draw():
    with pytest.raises(ValueError, match="nothing to draw"):
        size_quality_chart([])
