"""What speculation gains, read back from the figure."""

import pytest

from recipes_lib.report.curves import line_color
from recipes_lib.report.speculation_chart import Speculated, speculation_chart
from recipes_lib.report.style import RECIPE


def formula(acceptance):
    return (1 - acceptance**4) / (1 - acceptance)


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


def test_a_point_has_the_colour_of_its_line():
    """Catches points of one number of drafted tokens beside the line of another."""
    points = [
        Speculated("second", 0.8, 2.0, "k = 5"),
        Speculated("first", 0.5, 1.5, "k = 3"),
        Speculated("none", 0.1, 0.9),
    ]
    figure = speculation_chart(points, formula={"k = 3": formula, "k = 5": formula})
    dots = [line for line in figure.axes[0].get_lines() if line.get_marker() == "o"]
    assert [dot.get_color() for dot in dots] == [line_color(1), line_color(0), RECIPE]


def test_nothing_to_draw():
    with pytest.raises(ValueError, match="nothing to draw"):
        speculation_chart([], formula={})
