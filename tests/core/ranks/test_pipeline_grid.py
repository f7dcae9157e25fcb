"""The grid of a pipeline: what of it is idle, and what waits."""

import pytest

from recipes_lib.core.ranks.pipeline_grid import (
    BACKWARD,
    FORWARD,
    Action,
    bubble_of,
)


def test_a_bubble_and_what_is_in_flight():
    """The mistakes: idle time before the first action not counted, a backward that frees none."""
    first = [
        Action(0, 0, FORWARD, 0, 0, 1),
        Action(0, 0, FORWARD, 1, 1, 2),
        Action(0, 0, BACKWARD, 0, 4, 6),
        Action(0, 0, BACKWARD, 1, 7, 9),
    ]
    second = [Action(1, 1, FORWARD, 0, 1, 2), Action(1, 1, BACKWARD, 0, 2, 4)]
    second += [Action(1, 1, FORWARD, 1, 4, 5), Action(1, 1, BACKWARD, 1, 5, 7)]
    assert bubble_of(first + second) == pytest.approx(1 - 12 / 18)
