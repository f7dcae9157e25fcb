"""The roofline, read back from the figure."""

import pytest
import torch

from recipes_lib.report.roofline_chart import Work, roofline_chart
from tests.drawn import assert_apart, boxes_of, texts


def work(name, per_byte, rate, group="decode"):
    return Work(name, operations=per_byte * 1e9, bytes_read=1e9, seconds=per_byte * 1e9 / rate)


def test_roofline_has_the_slope_and_a_flat_line_per_rate():
    points = [work("fp32", 0.5, 1e10), work("int8", 2, 5e10), work("prefill", 256, 9e10)]
    rates = {torch.float32: 1e11, torch.bfloat16: 4e11}
    (axes,) = roofline_chart(points, bandwidth=40e9, rate=rates).axes
    slope, fp32, bf16, *dots = axes.get_lines()
    x, y = slope.get_data()
    assert (y / x).tolist() == pytest.approx([40e9, 40e9])
    assert x[1] == pytest.approx(10), "the slope ends at the highest ceiling"
    assert fp32.get_ydata() == pytest.approx([1e11, 1e11])
    assert bf16.get_ydata() == pytest.approx([4e11, 4e11])
    assert [dot.get_xdata()[0] for dot in dots] == pytest.approx([0.5, 2, 256])
    assert points[0].limit(bandwidth=40e9, rate=1e11) == pytest.approx(2e10)
    assert {"memory: 40 GB/s", "arithmetic, bfloat16\n400 G per second"} <= set(texts(axes))


def test_names_of_neighbours_do_not_cover_each_other():
    """Catches what a scatter of formats always has: several points at nearly one place."""
    points = [work(f"a long name, {number}", 0.5 + 0.01 * number, 1e10) for number in range(6)]
    (axes,) = roofline_chart(points, bandwidth=40e9, rate=1e11).axes
    boxes = boxes_of(axes, {point.name for point in points})
    assert len(boxes) == 6
    assert_apart(boxes)
    panel = axes.get_window_extent()
    assert all(panel.x0 <= box.x0 and box.x1 <= panel.x1 for box in boxes)


@pytest.mark.parametrize("wrong", [0.0, float("nan"), -1.0])
def test_points_that_are_none(wrong):
    with pytest.raises(ValueError, match="give a finite number above 0"):
        Work("x", operations=1.0, bytes_read=wrong, seconds=1.0)


def test_nothing_to_draw():
    with pytest.raises(ValueError, match="nothing to draw"):
        roofline_chart([], bandwidth=1.0, rate=1.0)
