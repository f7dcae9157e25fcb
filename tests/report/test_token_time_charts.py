"""The time of a token against bytes and position, read back from the figures."""

import pytest

from recipes_lib.report.overhead_fit import fit_overhead
from recipes_lib.report.token_time_charts import overhead_chart, position_time_chart


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


def test_nothing_to_draw():
    with pytest.raises(ValueError, match="nothing to draw"):
        overhead_chart({}, {})
    with pytest.raises(ValueError, match="nothing to draw"):
        position_time_chart({"a": []})
