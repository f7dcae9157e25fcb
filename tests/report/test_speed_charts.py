"""What the charts about speed draw, read back from the figures."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from matplotlib.text import Text

from recipes_lib.core.overhead_fit import fit_overhead
from recipes_lib.report.roofline_chart import Work, roofline_chart
from recipes_lib.report.size_quality_chart import Variant, size_quality_chart, worth_having
from recipes_lib.report.speed_charts import (
    Speculated,
    overhead_chart,
    position_time_chart,
    speculation_chart,
    speed_chart,
    throughput_chart,
)


def texts(axes):
    return [text.get_text() for text in axes.texts if text.get_text()]


def boxes_of(axes, names):
    """Where names are on the canvas, their lines to the points not counted."""
    axes.figure.draw_without_rendering()
    found = []
    for text in axes.texts:
        if text.get_text() in names:
            found.append(Text.get_window_extent(text))  # an annotation's own counts its line, too
    return found


def assert_apart(boxes):
    for box, other in itertools.combinations(boxes, 2):
        assert not box.overlaps(other)


def row(name, speed, share, **more):
    return {"name": name, "tokens_per_second": speed, "share_of_limit": share, **more}


# --- the ladder -----------------------------------------------------------------------------------


def test_speed_chart_compares_within_a_group():
    """Catches a second model that is compared with the first, and a whisker upside down."""
    turns = {"tokens_per_second_low": 120, "tokens_per_second_high": 150, "ratio": 4.4}
    rows = [
        row("fp32", 33, 0.43, group="small", perplexity=7.995),
        row("int8", 146, 0.48, group="small", perplexity=8.18, **turns),
        row("fp32, large", 10, 0.5, group="large"),
        row("int8, large", 50, 0.5, group="large"),
    ]
    bars, shares, perplexities = speed_chart(rows).axes
    assert texts(bars) == ["33", "146  4.40×", "10", "50  5.00×"]
    assert texts(shares) == ["43%", "48%", "50%", "50%"]
    assert texts(perplexities) == ["8.00", "8.18"]
    (segment,) = bars.collections[0].get_segments()
    assert segment[:, 0].tolist() == pytest.approx([120, 150])
    assert bars.get_xlim()[0] == 0
    assert speed_chart(rows).message == "33 → 146 tokens per second with int8"


# --- roofline -------------------------------------------------------------------------------------


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


# --- size against quality -------------------------------------------------------------------------

VARIANTS = [
    Variant("fp32", 4.0, 7.99),
    Variant("fp16", 2.0, 8.00),
    Variant("int8", 1.01, 8.04),
    Variant("int8, dynamic", 1.01, 8.18),
    Variant("int4, rounded", 0.63, 8.60),
    Variant("int4, AWQ", 0.63, 8.26),
]


def test_what_is_larger_and_worse_is_not_worth_having():
    names = [point.name for point in worth_having(VARIANTS)]
    assert names == ["int4, AWQ", "int8", "fp16", "fp32"]


def test_size_quality_chart_names_every_point():
    (axes,) = size_quality_chart(VARIANTS).axes
    names = {f"{point.name}  {point.perplexity:.2f}" for point in VARIANTS}
    assert names <= set(texts(axes))
    assert_apart(boxes_of(axes, names))
    assert axes.get_yscale() == "linear"
    broken = [*VARIANTS, Variant("int4, one scale", 0.5, 4000.0)]
    (axes,) = size_quality_chart(broken).axes
    assert axes.get_yscale() == "log", "one broken variant would press all others into a line"


# --- curves ---------------------------------------------------------------------------------------


def test_overhead_chart_begins_at_the_overhead():
    points = [(size, 0.005 + size / 20e9) for size in (1e8, 2e8, 4e8)]
    (axes,) = overhead_chart({"loop": points}, {"loop": fit_overhead(points)}).axes
    line = axes.get_lines()[0]
    assert line.get_xdata()[0] == 0
    assert line.get_ydata()[0] == pytest.approx(5)
    assert axes.get_ylim()[0] == 0
    with pytest.raises(ValueError, match=r"no fit for \['loop'\]"):
        overhead_chart({"loop": points}, {})


def test_position_time_chart_is_in_milliseconds_from_zero():
    curves = {"no cache": [(1, 0.01), (100, 1.0)], "cache": [(1, 0.02), (100, 0.02)]}
    (axes,) = position_time_chart(curves).axes
    assert axes.get_lines()[1].get_ydata() == pytest.approx([20, 20])
    assert axes.get_ylim()[0] == 0


def test_speculation_chart_draws_the_formula_beside_the_points():
    points = [Speculated("code", 0.8, 2.0, "k = 3"), Speculated("chat", 0.1, 0.9, "k = 3")]
    figure = speculation_chart(points, formula={"k = 3": formula})
    (axes,) = figure.axes
    line, _one, *dots = axes.get_lines()
    assert line.get_ydata()[0] == pytest.approx(1)
    assert line.get_xdata()[-1] < 1, "the formula may divide by zero at 1"
    assert [dot.get_ydata()[0] for dot in dots] == [2.0, 0.9]
    with pytest.raises(ValueError, match="from 0 to 1"):
        speculation_chart([Speculated("percent", 80, 2.0)], formula={"k = 3": formula})
    with pytest.raises(ValueError, match="give one of"):
        speculation_chart([Speculated("code", 0.8, 2.0, "k = 5")], formula={"k = 3": formula})


def formula(acceptance):
    return (1 - acceptance**4) / (1 - acceptance)


def step_of(batch, seconds):
    return SimpleNamespace(batch=batch, seconds_per_step=seconds)


def test_throughput_chart_waits_for_a_whole_step():
    """Catches a wait that is divided by the batch: each text waits for all of them."""
    steps = [step_of(32, 0.064), step_of(1, 0.02)]
    (axes,) = throughput_chart({"bf16": steps}).axes
    *batches, line = axes.get_lines()
    assert line.get_xdata() == pytest.approx([20, 64])
    assert line.get_ydata() == pytest.approx([50, 500])
    for batch, diagonal in zip((1, 32), batches, strict=True):
        x, y = diagonal.get_data()
        assert (x * y / 1000).tolist() == pytest.approx([batch, batch])


def test_nothing_to_draw():
    for draw in (
        lambda: speed_chart([]),
        lambda: roofline_chart([], bandwidth=1.0, rate=1.0),
        lambda: size_quality_chart([]),
        lambda: overhead_chart({}, {}),
        lambda: position_time_chart({"a": []}),
        lambda: speculation_chart([], formula={}),
        lambda: throughput_chart({}),
    ):
        with pytest.raises(ValueError, match="nothing to draw"):
            draw()


@pytest.mark.parametrize("wrong", [0.0, float("nan"), -1.0])
def test_points_that_are_none(wrong):
    with pytest.raises(ValueError, match="give a finite number above 0"):
        Work("x", operations=1.0, bytes_read=wrong, seconds=1.0)
    with pytest.raises(ValueError, match="give a finite number above 0"):
        Variant("x", 1.0, wrong)
    with pytest.raises(ValueError, match="give a finite number above 0"):
        throughput_chart({"x": [step_of(1, wrong)]})
