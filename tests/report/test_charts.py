"""What the charts draw, read back from the figures."""

from collections import namedtuple

import pytest
from matplotlib.colors import to_hex

from recipes_lib.core.budget import Budget
from recipes_lib.core.timeline import KINDS, Point, Timeline
from recipes_lib.report.charts import (
    budget_chart,
    change_chart,
    chart,
    growth_chart,
    length_chart,
    loss_chart,
    position_chart,
    slope,
    timeline_chart,
)
from recipes_lib.report.style import MIB, RECIPE, REFERENCE

Change = namedtuple("Change", "difference low high")


def row(name, peak, predicted, seconds):
    sizes = {"peak_bytes": peak * MIB, "predicted_bytes": predicted * MIB}
    return {"name": name, **sizes, "seconds": seconds}


def texts(axes):
    return [text.get_text() for text in axes.texts]


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_chart_draws_one_bar_per_row():
    rows = [row("baseline", 1000, 950, 2.0), row("half", 500, 525, 14.0)]
    memory, time = chart(rows, title="a machine").axes
    assert [round(bar.get_width()) for bar in memory.patches] == [1000, 500]
    assert memory.get_lines()[0].get_xdata().tolist() == [950, 525]
    assert texts(memory) == ["1,000", "500  (-50%)"]
    assert memory.texts[1].xy[0] == 525, "the text stands beside the tick where that is further"
    assert [bar.get_width() for bar in time.patches] == [2.0, 14.0]
    assert texts(time) == ["2", "14"]


def test_budget_chart_stacks_what_is_alive_at_the_peak():
    """The mistake: terms of different moments are stacked, which are never alive together."""
    terms = dict.fromkeys(("carried", "block_gradients", "last_gradients"), 0)
    terms |= {"weights": 10, "states": 20, "loss": 8, "one_block": 3}
    forward = Budget(**terms, gradients=5, activations=40, embedding_gradient=1)
    backward = Budget(**terms, gradients=50, activations=30, embedding_gradient=4)
    at_forward = {"weights": 10, "states": 20, "gradients": 0, "activations": 40, "loss": 8}
    at_backward = {"weights": 10, "states": 20, "gradients": 54, "activations": 0, "loss": 0}
    assert forward.at_peak() == at_forward
    assert backward.at_peak() == at_backward
    (axes,) = budget_chart({"a": forward, "b": backward}).axes
    # Two bars per term, in the order of the terms: first those of a, then those of b.
    widths = [round(bar.get_width() * MIB) for bar in axes.patches]
    assert widths[0::2] == list(at_forward.values())
    assert widths[1::2] == list(at_backward.values())
    ends = [bar.get_x() + bar.get_width() for bar in axes.patches]
    assert max(ends) * MIB == pytest.approx(max(forward.peak, backward.peak))
    assert legend(axes) == list(at_backward)


def test_loss_chart_draws_a_line_per_run():
    (axes,) = loss_chart({"a": [(0, 4.0), (5, 3.0)], "b": [(0, 4.5), (5, 2.5)]}).axes
    assert [line.get_label() for line in axes.get_lines()] == ["a", "b"]
    assert axes.get_lines()[1].get_ydata().tolist() == [4.5, 2.5]


def test_change_chart_draws_a_point_with_its_interval_per_run():
    """The mistake: an interval that is not symmetric is drawn as if it were."""
    changes = {"a": Change(-0.3, -0.5, -0.2), "b": Change(0.1, -0.1, 0.2)}
    (axes,) = change_chart(changes).axes
    bars = [bar for collection in axes.collections for bar in collection.get_segments()]
    assert bars[0][:, 0].tolist() == pytest.approx([-0.5, -0.2])
    assert bars[1][:, 0].tolist() == pytest.approx([-0.1, 0.2])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    assert axes.yaxis_inverted()


def test_position_chart_puts_each_loss_into_the_middle_of_its_window():
    figure = position_chart({"plain": [3.0, 4.0]}, window=512, trained=512, title="texts")
    assert figure.axes[0].lines[0].get_xdata().tolist() == [256, 768]


def test_length_chart_is_logarithmic_and_marks_the_baseline():
    rows = [
        {"name": "plain", "tokens": 100, "predicted_tokens": 105},
        {"name": "better", "tokens": 2000, "predicted_tokens": 1900},
    ]
    (axes,) = length_chart(rows, title="a machine").axes
    assert axes.get_xscale() == "log"
    assert [bar.get_width() for bar in axes.patches] == [100, 2000]
    assert texts(axes) == ["100", "2,000"]
    colors = [to_hex(bar.get_facecolor()) for bar in axes.patches]
    assert colors == [REFERENCE, RECIPE]


def test_growth_chart_says_the_slope_at_the_end():
    curves = {
        "square": {10: 110, 100: 10_010, 1000: 10**6 + 10},
        "line": {10: 20, 100: 110, 1000: 1010},
    }
    assert slope(curves["square"], 10) == pytest.approx(2)
    (axes,) = growth_chart(curves, fixed_bytes=10, limit_bytes=10**6).axes
    assert legend(axes) == ["square: slope 2.00", "line: slope 1.00", "the limit: 0.0 GiB"]


def timeline():
    def point(operator, phase, activations):
        sizes = {"weights": 4 * MIB, "states": 8 * MIB, "gradients": 0, "other": 0}
        return Point(operator, phase, sizes | {"activations": activations * MIB})

    return Timeline([point(0, "forward", 0), point(50, "backward", 6), point(100, "backward", 0)])


def test_timeline_chart_stacks_the_kinds_up_to_the_peak():
    """Catches a kind that is missing in the stack, panels of unequal scale, a lost prediction."""
    figure = timeline_chart(
        {"plain": timeline(), "lean": timeline()}, predicted={"plain": 17 * MIB}
    )
    plain, lean = figure.axes
    heights = [path.get_paths()[0].vertices[:, 1].max() for path in plain.collections[: len(KINDS)]]
    assert max(heights) == 4 + 8 + 6
    texts = [text.get_text() for text in plain.texts]
    assert any("peak 18 MiB" in text and "activations 6" in text for text in texts)
    assert {"forward", "backward", "predicted 17 MiB"} <= set(texts)
    assert not any("predicted" in text.get_text() for text in lean.texts)
    assert plain.get_ylim() == lean.get_ylim() and plain.get_ylim()[0] == 0


def test_nothing_to_draw():
    """The mistake: an empty frame, or an error from deep inside matplotlib."""
    with pytest.raises(ValueError, match="nothing to draw"):
        chart([], title="")
    with pytest.raises(ValueError, match="nothing to draw"):
        loss_chart({"a": []})
    for draw in (budget_chart, change_chart):
        with pytest.raises(ValueError, match="nothing to draw"):
            draw({})
