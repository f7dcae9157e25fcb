"""Bars of tokens per second, read back from the figure."""

import pytest

from recipes_lib.report.speed_chart import speed_chart
from tests.drawn import texts


def row(name, speed, share, **more):
    return {"name": name, "tokens_per_second": speed, "share_of_limit": share, **more}


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


def test_the_label_stands_behind_whatever_reaches_furthest():
    """Catches a number that lies on its whisker, or on a limit."""
    fast = {"tokens_per_second_low": 80, "tokens_per_second_high": 300}
    bars, _ = speed_chart([row("limit", 50, 0.5), row("whisker", 100, 1.0, **fast)]).axes
    assert [text.xy[0] for text in bars.texts] == [100, 300]


def test_nothing_to_draw():
    with pytest.raises(ValueError, match="nothing to draw"):
        speed_chart([])
