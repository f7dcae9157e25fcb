"""What the grid of a pipeline draws, read back from the figure."""

import pytest
from matplotlib.colors import to_hex

from recipes_lib.core.ranks.pipeline_grid import BACKWARD, FORWARD, Action
from recipes_lib.report.figure import page
from recipes_lib.report.lanes_chart import COLORS
from recipes_lib.report.pipeline_chart import pipeline_chart
from recipes_lib.report.style import DARK


def grid(stages_on_rank=1):
    """Two ranks, one micro-batch: with one stage each, a rank is busy for 3 of 6 seconds."""
    actions = []
    stages = 2 * stages_on_rank
    for stage in range(stages):
        actions.append(Action(stage % 2, stage, FORWARD, 7).at(5 + stage, 6 + stage))
    now = 5 + stages
    for stage in reversed(range(stages)):
        actions.append(Action(stage % 2, stage, BACKWARD, 7).at(now, now + 2))
        now += 2
    return actions


def cells(axes):
    """(line, begin, end, colour) of each bar in seconds, without the grey ones behind."""
    found = []
    for bars in axes.containers[1:]:
        for bar in bars:
            line = round(bar.get_y() + bar.get_height() / 2)
            begin = bar.get_x() / 1000
            end = begin + bar.get_width() / 1000
            found.append((line, round(begin, 6), round(end, 6), to_hex(bar.get_facecolor())))
    return found


def words(axes):
    return [text.get_text() for text in axes.texts]


def test_cells_are_where_the_actions_are():
    """Catches cells in the line of another rank, colours that are exchanged, and a late begin."""
    (axes,) = pipeline_chart({"1F1B": grid()}).axes
    forward, backward = COLORS[FORWARD], COLORS[BACKWARD]
    assert sorted(cells(axes)) == sorted(
        [(0, 0, 1, forward), (1, 1, 2, forward), (1, 2, 4, backward), (0, 4, 6, backward)]
    )
    assert words(axes) == ["7"] * 4
    assert axes.get_title(loc="left") == "1F1B: 50% idle, 6,000 ms"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]
    assert axes.yaxis_inverted(), "rank 0 is on top"
    # Grey behind all of it, from the first begin to the last end.
    assert [(bar.get_x(), bar.get_width()) for bar in axes.containers[0]] == [(0, 6000)] * 2


def test_schedules_are_compared_on_one_scale():
    """Catches panels with scales of their own, and a message about the wrong one."""
    half = [action.at(action.begin, action.begin + 0.5) for action in grid()]
    figure = pipeline_chart({"all first": half, "in turns": grid()})
    upper, lower = figure.axes
    assert upper.get_xlim() == lower.get_xlim()
    assert figure.message == "In turns leaves the ranks idle for 50% of the time, all first for 78%"
    assert pipeline_chart({"a": grid(), "b": grid()}).message == (
        "The ranks are idle for 50% of the time"
    )


def test_later_stages_of_a_rank_are_paler():
    """Catches two stages of one rank that cannot be told apart."""
    (axes,) = pipeline_chart({"interleaved": grid(stages_on_rank=2)}).axes
    colors = {color for *_, color in cells(axes)}
    assert len(colors) == 4 and {COLORS[FORWARD], COLORS[BACKWARD]} < colors


def test_a_cell_that_is_too_narrow_has_no_number():
    """Catches numbers that run into each other."""
    narrow = [Action(0, 0, FORWARD, number).at(number, number + 0.9) for number in range(300)]
    (axes,) = pipeline_chart({"many": narrow}).axes
    assert words(axes) == []


def test_the_bubble_is_grey_on_a_dark_page_too():
    with page(dark=True):
        (axes,) = pipeline_chart.__wrapped__({"1F1B": grid()}).axes
    assert {to_hex(bar.get_facecolor()) for bar in axes.containers[0]} == {DARK["faint"]}


def test_wrong_input():
    with pytest.raises(ValueError, match="nothing to draw"):
        pipeline_chart({})
