"""What the charts of losses draw, read back from the figures."""

from collections import namedtuple

import pytest

from recipes_lib.report.loss_charts import change_chart, loss_chart, position_chart

Change = namedtuple("Change", "difference low high")


def test_loss_chart_names_each_line_at_its_end_and_no_name_covers_another():
    """Catches names that overlap because their runs end at the same loss, or that are swapped."""
    curves = {"a": [(0, 4.0), (5, 2.5)], "b": [(0, 4.5), (5, 2.5)], "c": [(0, 4.2), (5, 2.6)]}
    figure = loss_chart(curves)
    (axes,) = figure.axes
    assert axes.get_lines()[1].get_ydata().tolist() == [4.5, 2.5]
    figure.draw_without_rendering()
    names = [text for text in axes.texts if text.get_text()]
    assert [text.get_text() for text in names] == ["a  2.50", "b  2.50", "c  2.60"]
    for line, text in zip(axes.get_lines(), names, strict=True):
        assert text.get_color() == line.get_color()
    boxes = [text.get_window_extent() for text in names]
    assert not any(boxes[i].overlaps(boxes[j]) for i, j in ((0, 1), (1, 2), (0, 2)))
    assert boxes[2].y0 > boxes[0].y1, "the highest end has the highest name"


def test_change_chart_draws_a_point_with_its_interval_per_run():
    """Catches an interval that is not symmetric and drawn as if it were, and a cut-off zero."""
    changes = {"a": Change(-0.3, -0.5, -0.2), "b": Change(-0.1, -0.4, -0.05)}
    (axes,) = change_chart(changes).axes
    bars = [bar for collection in axes.collections for bar in collection.get_segments()]
    assert bars[0][:, 0].tolist() == pytest.approx([-0.5, -0.2])
    assert bars[1][:, 0].tolist() == pytest.approx([-0.4, -0.05])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    assert axes.yaxis_inverted(), "the first run is on top"
    assert axes.get_xlim()[0] < -0.5 and axes.get_xlim()[1] > 0
    assert "-0.30  (-0.50 to -0.20)" in [text.get_text() for text in axes.texts]


def test_position_chart_puts_each_loss_into_the_middle_of_its_window():
    figure = position_chart({"plain": [[3.0, 4.0]]}, window=512, trained=512, title="texts")
    assert figure.axes[0].lines[0].get_xdata().tolist() == [256, 768]
    assert "measured" not in "".join(text.get_text() for text in figure.texts), (
        "recorded losses are not those of this machine"
    )


def test_position_chart_compares_each_text_with_itself():
    """Catches a band of the losses, which texts widen, in place of one of the differences."""
    losses = {"none": [[3.0, 3.5], [5.0, 5.0]], "yarn": [[3.1, 3.25], [5.3, 4.5]]}
    above, below = position_chart(losses, window=64, trained=64, title="texts").axes
    assert above.lines[1].get_ydata().tolist() == pytest.approx([4.2, 3.875])
    assert below.lines[1].get_ydata().tolist() == pytest.approx([0.2, -0.375])
    _, band = below.collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((-0.5, 0.3))


def test_nothing_to_draw():
    """Catches an empty frame, or an error from deep inside matplotlib."""
    with pytest.raises(ValueError, match="nothing to draw"):
        loss_chart({"a": []})
    with pytest.raises(ValueError, match="nothing to draw"):
        change_chart({})
    with pytest.raises(ValueError, match="nothing to draw"):
        position_chart({}, window=512, trained=512, title="texts")
