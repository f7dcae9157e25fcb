"""What the chart of growing memory draws, read back from the figure."""

import pytest

from recipes_lib.core.measure.machine import GIB
from recipes_lib.report.growth_chart import growth_chart, slope


def test_growth_chart_shows_whole_peaks_below_the_whole_limit():
    """Catches a limit of 4 GiB that is drawn at what is left of it, and a slope of the sum."""
    curves = {
        "square": {10: 110, 100: 10_010, 1000: 10**6 + 10},
        "line": {10: 20, 100: 110, 1000: 1010},
    }
    curves = {name: {s: size * GIB for s, size in each.items()} for name, each in curves.items()}
    curves["line"][2000] = None  # this length ran out of memory
    assert slope(curves["square"], 10 * GIB) == pytest.approx(2)
    (axes,) = growth_chart(curves, fixed_bytes=10 * GIB, limit_bytes=500 * GIB).axes
    line = axes.get_lines()[1]
    assert line.get_ydata() == pytest.approx([20, 110, 1010])
    texts = {text.get_text(): text.xy[1] for text in axes.texts}
    assert texts["the limit: 500.0 GiB"] == 500
    assert {"square: slope 2.00", "line: slope 1.00"} <= set(texts)
