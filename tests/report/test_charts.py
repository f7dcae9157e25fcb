"""The primitives draw what they are given, at its place: read back from the figures."""

from types import SimpleNamespace

import pytest
import torch

from recipes_lib.core.measure.timeline import Point, Timeline
from recipes_lib.report.charts.bars import Bars, bars
from recipes_lib.report.charts.delegated_operators import delegation_chart
from recipes_lib.report.charts.lines import lines
from recipes_lib.report.charts.memory_timeline import timeline_chart
from recipes_lib.report.charts.pattern import pattern_chart
from recipes_lib.report.charts.points import points, worth_having
from recipes_lib.report.charts.spans import Span, spans
from recipes_lib.report.style import MIB


def texts(axes):
    return [text.get_text() for text in axes.texts if text.get_text()]


def test_bars_stand_below_their_group_with_all_that_belongs_to_them():
    """The mistake: a tick or a label of the neighbouring row."""
    column = Bars("MiB", [4, 2], ["four", "two"], marks=[4.5, None], ranges=[(4, 6), (2, 2.5)])
    figure = bars(["a", "b"], column, title="Message", groups=["one", "two"])
    axes = figure.axes[0]
    figure.png()
    labels = [label.get_text() for label in axes.get_yticklabels()]
    places = dict(zip(labels, axes.get_yticks(), strict=True))
    assert labels == ["a", "b", "one", "two"]
    assert places["one"] < places["a"] < places["two"] < places["b"]
    tick, *whiskers = [line.get_xydata().tolist() for line in axes.lines]
    assert [x for x, _ in tick] == [4.5, 4.5] and tick[0][1] < places["a"] < tick[1][1]
    a, b = places["a"], places["b"]
    assert whiskers == [[[4, a], [6, a]], [[2, b], [2.5, b]]]
    assert texts(axes) == ["four", "two"]
    # The longest label ends inside of the picture, behind its whisker.
    boxes = [text.get_window_extent() for text in axes.texts if text.get_text()]
    assert max(box.x1 for box in boxes) < figure.bbox.x1
    assert boxes[0].x0 > axes.transData.transform((6, 0))[0]


def test_parts_are_stacked_and_say_their_numbers():
    """The mistake: parts that all begin at zero."""
    column = Bars("MiB", {"w": [4, 2], "s": [8, 4]}, ["12", "6"], colors={"w": "r", "s": "b"})
    axes = bars(["a", "b"], column, title="Message").axes[0]
    assert [bar.get_x() for bar in axes.containers[1]] == [4, 2]
    assert texts(axes) == ["12", "6", "4", "2", "8", "4"]


def test_lines_are_named_at_their_ends():
    curves = {"a": [(1, 2.0), (10, 4.0)], "b": [(1, 1.0), (10, 8.0)]}
    figure = lines(curves, title="Message", xscale="log")
    axes = figure.axes[0]
    assert [line.get_xydata().tolist() for line in axes.lines] == [
        [[1, 2], [10, 4]],
        [[1, 1], [10, 8]],
    ]
    assert texts(axes) == ["a", "b"]
    assert len({line.get_linestyle() for line in axes.lines}) == 2  # not by colour alone


def test_points_and_the_ones_worth_having():
    """The mistake: a point that is larger and worse than another one lies on the line."""
    places = {"fp32": (4, 8.0), "int8": (1, 8.1), "worse": (2, 9.0), "int4": (0.6, 10.0)}
    axes = points(places, title="Message", front=True).axes[0]
    *dots, level, front = [line.get_xydata().tolist() for line in axes.lines]
    assert [dot[0] for dot in dots] == [list(place) for place in places.values()]
    assert level[0][1] == 8.0
    assert front == [[0.6, 10.0], [1, 8.1], [4, 8.0]]
    assert sorted(texts(axes)) == sorted(places)
    assert worth_having([(1, 5), (1, 5)]) == [(1, 5)]


def test_spans_are_on_one_scale_from_the_beginning_of_their_step():
    """The mistake: a step that began later is drawn further to the right, and looks longer."""
    early = [Span("rank 0", "forward", 0.0, 0.1, "1"), Span("rank 1", "backward", 0.1, 0.4)]
    late = [Span("rank 0", "forward", 7.0, 7.2, "a text without room " * 9)]
    first, second = spans({"early": early, "late": late}, title="Message").axes
    assert [bar.get_x() for bar in first.patches[2:]] == pytest.approx([0, 100])
    assert [bar.get_width() for bar in first.patches[2:]] == pytest.approx([100, 300])
    assert second.patches[-1].get_x() == pytest.approx(0)
    assert first.get_xlim() == second.get_xlim() == (0, pytest.approx(400))
    assert (texts(first), texts(second)) == (["1"], [])
    assert second.get_title(loc="left") == "late: 200 ms"


def step(states):
    def point(operator, phase, activations):
        sizes = {"weights": 4 * MIB, "states": states * MIB, "gradients": 0, "other": 0}
        return Point(operator, phase, sizes | {"activations": activations * MIB})

    forward = [point(0, "forward", 0), point(25, "forward", 6)]
    return Timeline([*forward, point(50, "backward", 6), point(100, "backward", 0)])


def test_a_timeline_marks_its_peak_and_the_prediction_of_its_own_step():
    """The mistake: a kind that is missing in the stack, or a scale of its own for each panel."""
    both = {"plain": step(8), "lean": step(2)}
    plain, lean = timeline_chart(both, predicted={"plain": step(7)}, title="Message").axes
    dots = [[line for line in axes.lines if line.get_marker() == "o"] for axes in (plain, lean)]
    # From left to right: the bytes that have come and gone.
    assert [dot.get_xydata().tolist() for (dot,) in dots] == [[[6 * MIB, 18]], [[6 * MIB, 12]]]
    assert {"18 MiB", "forward", "backward"} <= set(texts(plain))
    assert "activations 6.0 MiB\nstates 8.0 MiB\nweights 4.0 MiB" in texts(plain)[-1]
    (dashes,) = [line.get_ydata() for line in plain.lines if line.get_linestyle() == "--"]
    assert max(dashes) == 17, "the timeline that was predicted, over the measured one"
    assert "--" not in [line.get_linestyle() for line in lean.lines]
    assert plain.get_ylim() == lean.get_ylim()


def test_a_timeline_marks_the_end_of_backward_like_its_peak():
    """The mistake: the second tower, which is over in an operator or two, is too thin to see."""

    def point(operator, phase, gradients):
        nothing = dict.fromkeys(("states", "activations", "other"), 0)
        return Point(operator, phase, nothing | {"weights": 4 * MIB, "gradients": gradients * MIB})

    points = [point(0, "forward", 0), point(40, "backward", 9), point(99, "backward", 3)]
    points += [point(100, "backward", 7), point(101, "backward", 5), point(102, "step", 0)]
    (axes,) = timeline_chart({"plain": Timeline(points)}, title="Message", both_towers=True).axes
    dots = [line.get_xydata().tolist() for line in axes.lines if line.get_marker() == "o"]
    assert dots == [[[9 * MIB, 13]], [[19 * MIB, 11]]]
    assert "at the end of backward\ngradients 7.0 MiB\nweights 4.0 MiB" in texts(axes)[-1]
    assert [each.total for each in Timeline(points).towers()] == [13 * MIB, 11 * MIB]


def test_a_pattern_counts_causal_pairs_only():
    """The mistake: a share of the whole square, of which a causal model never reads the half."""
    full = torch.ones(4, 4, dtype=torch.bool)
    near, whole = pattern_chart({"near": full.triu(-1), "full": full}, title="Message").axes
    assert near.get_xlabel() == "70% of the pairs"
    assert whole.get_xlabel() == "100% of the pairs"


def test_what_stays_outside_has_a_bar_of_its_own():
    """The mistake: the few slow operators are among "all others"."""
    rows = [SimpleNamespace(name=f"op{n}", inside=10 - n, outside=0) for n in range(8)]
    rows.append(SimpleNamespace(name="slow", inside=0, outside=1))
    export = SimpleNamespace(rows=rows)
    axes = delegation_chart({"all": export}, most=4, title="Message").axes[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["slow", "op0", "op1", "op2", "all others"]
    assert [bar.get_width() for bar in axes.containers[1]] == [1, 0, 0, 0, 0]
    assert axes.get_title(loc="left") == "all\n52 of 53 inside"
