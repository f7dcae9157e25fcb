"""The size of a file against what is wrong with its answers, read back from the figure."""

import pytest

from recipes_lib.report.size_axes import worth_having
from recipes_lib.report.size_error_chart import SizeError, chance, size_error_chart
from tests.drawn import assert_apart, boxes_of, texts

POINTS = [
    SizeError("fp32", 2_900_000, accuracy=0.981),
    SizeError("pruned", 1_400_000, accuracy=0.975),
    SizeError("int8", 890_000, accuracy=0.979),
    SizeError("pruned, int8", 480_000, accuracy=0.97),
]


def test_what_is_larger_and_worse_is_not_worth_having():
    """Catches a front that takes the smaller of two files without a look at its quality."""
    front = worth_having(POINTS, lambda point: (point.megabytes, point.error))
    assert [point.name for point in front] == ["pruned, int8", "int8", "fp32"]


def test_the_chart_draws_wrong_answers_and_names_every_point():
    (axes,) = size_error_chart(POINTS).axes
    names = {point.name for point in POINTS}
    assert names <= set(texts(axes))
    assert_apart(boxes_of(axes, names))
    dots = [line.get_ydata()[0] for line in axes.lines if line.get_marker() == "o"]
    assert dots == pytest.approx([1.9, 2.5, 2.1, 3.0])


def test_points_that_cover_each_other_are_one_point_with_both_names():
    """Catches two names beside what looks like one point, and points joined across qualities."""
    near = SizeError("fp32, exported", 2_880_000, accuracy=0.981)
    worse = SizeError("fp32, other seed", 2_890_000, accuracy=0.98)
    (axes,) = size_error_chart([*POINTS, near, worse]).axes
    assert {"fp32 · fp32, exported", "fp32, other seed"} <= set(texts(axes))
    assert sum(line.get_marker() == "o" for line in axes.lines) == 5


def test_a_point_that_stretches_the_axis_can_be_left_out():
    """Catches an axis that still reaches to what is not drawn."""
    far = SizeError("zeros", 2_900_000, accuracy=0.9)
    (axes,) = size_error_chart([*POINTS, far], leave_out=["zeros"]).axes
    assert "zeros" not in texts(axes)
    assert axes.get_ylim()[1] < 4
    with pytest.raises(ValueError, match="leave_out has 'zero': the points are fp32"):
        size_error_chart(POINTS, leave_out=["zero"])
    with pytest.raises(ValueError, match="so keep it"):
        size_error_chart(POINTS, leave_out=["fp32"])
    with pytest.raises(ValueError, match="give a list of names"):
        size_error_chart(POINTS, leave_out="int8")


def test_the_band_of_chance_is_in_the_picture():
    """Catches an axis so narrow that the chance of 2,000 images looks like the price of a file."""
    assert chance(POINTS[0], 2000) == pytest.approx((1.302, 2.498), abs=2e-3)
    (axes,) = size_error_chart(POINTS[:1], tested=2000).axes
    low, high = axes.get_ylim()
    assert low < 1.302 and high > 2.498
    assert chance(SizeError("never wrong", 1, accuracy=1.0), 10) == (0, 0)
    with pytest.raises(ValueError, match="tested=0"):
        chance(POINTS[0], 0)
    with pytest.raises(ValueError, match="text has a perplexity"):
        size_error_chart([SizeError("text", 1, perplexity=3.0)], tested=8)


def test_one_quality_for_all_points():
    with pytest.raises(ValueError, match="either accuracy= or perplexity="):
        SizeError("both", 1, accuracy=0.9, perplexity=3.0)
    with pytest.raises(ValueError, match="one chart each"):
        size_error_chart([*POINTS, SizeError("text", 1, perplexity=3.0)])
    with pytest.raises(ValueError, match="accuracy=98: give a number from 0 to 1"):
        SizeError("per cent", 1, accuracy=98)
    with pytest.raises(ValueError, match="nothing to draw"):
        size_error_chart([])
