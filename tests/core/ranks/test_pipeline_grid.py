"""The grid of a pipeline: when actions can begin, what is idle, and orders that cannot work."""

import pytest

from recipes_lib.core.ranks.pipeline_grid import (
    BACKWARD,
    FORWARD,
    Action,
    bubble_of,
    median_seconds,
    most_in_flight,
    place,
    span,
)


def orders(*lines):
    """`"F0 B0"` for each rank, which has the stage of its number."""
    found = []
    for rank, line in enumerate(lines):
        order = []
        for word in line.split():
            direction = FORWARD if word[0] == "F" else BACKWARD
            order.append(Action(rank, rank, direction, int(word[1:])))
        found.append(order)
    return found


def one_and_two(action):
    return 1.0 if action.direction == FORWARD else 2.0


def drawn(actions, rank):
    """One letter for each second of a rank, a point where it is idle."""
    cells = ["."] * round(span(actions))
    for action in actions:
        if action.rank == rank:
            for second in range(round(action.begin), round(action.end)):
                cells[second] = f"{action.direction[0].upper()}{action.micro_batch}"
    return " ".join(cells)


def test_the_grid_of_the_docstring():
    """Catches an action that begins before its input is there, or later than it could."""
    grid = place(orders("F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"), seconds=one_and_two)
    assert drawn(grid, 0) == "F0 F1 . . B0 B0 F2 B1 B1 . B2 B2"
    assert drawn(grid, 1) == ". F0 B0 B0 F1 B1 B1 F2 B2 B2 . ."
    assert bubble_of(grid) == pytest.approx(1 - 18 / 24)
    assert [most_in_flight(order) for order in orders("F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1")] == [2, 1]


def test_one_rank_has_no_bubble():
    grid = place(orders("F0 B0 F1 B1"), seconds=one_and_two)
    assert bubble_of(grid) == 0
    assert span(grid) == 6


def test_orders_that_wait_for_ever_are_refused():
    """Catches a loop without end: rank 0 wants a gradient that rank 1 makes only later."""
    with pytest.raises(ValueError, match="the backward of micro-batch 0 in stage 0 waits for ever"):
        place(orders("B0 F0", "F0 B0"), seconds=one_and_two)
    with pytest.raises(ValueError, match="the forward of micro-batch 1 in stage 1 waits for ever"):
        place(orders("F0 B0", "F0 B0 F1 B1"), seconds=one_and_two)


def test_a_grid_is_drawn_again_from_measured_seconds():
    """Catches a mean, which one slow action would move, and seconds of another stage."""
    measured = [
        Action(0, 0, FORWARD, number).at(10 * number, 10 * number + seconds)
        for number, seconds in enumerate([1, 9, 1])
    ]
    measured += [Action(0, 0, BACKWARD, 0).at(50, 52)]
    grid = place(orders("F0 F1 B0 B1"), seconds=median_seconds(measured))
    assert drawn(grid, 0) == "F0 F1 B0 B0 B1 B1"
    with pytest.raises(ValueError, match="no forward of stage 1 was measured"):
        place(orders("F0", "F0"), seconds=median_seconds(measured))


def test_actions_without_times_have_no_bubble():
    with pytest.raises(ValueError, match="no action has a time"):
        bubble_of([Action(0, 0, FORWARD, 0)])
    with pytest.raises(ValueError, match="no action has a time"):
        bubble_of([])
