import torch

from recipes_lib.core.model import marks
from recipes_lib.core.model.marks import any_marked, mark, marked, unmark

NAMES = [value for name, value in vars(marks).items() if name.isupper()]


def test_every_mark_is_in_the_table():
    """A mark that is not listed is a secret between two techniques."""
    constants = [name for name in vars(marks) if name.isupper()]
    assert len(constants) == 11
    for constant in constants:
        assert constant in marks.__doc__


def test_no_two_marks_are_the_same():
    assert len(set(NAMES)) == len(NAMES)


def test_block_number_zero_is_a_mark():
    """The first block would look as if it were not checkpointed."""
    block = torch.nn.Linear(1, 1)
    mark(block, marks.CHECKPOINTED_INDEX, 0)
    assert marked(block, marks.CHECKPOINTED_INDEX)


def test_false_is_no_mark():
    block = torch.nn.Linear(1, 1)
    mark(block, marks.STEPS_IN_BACKWARD, False)
    assert not marked(block, marks.STEPS_IN_BACKWARD)


def test_taken_away():
    parameter = torch.nn.Parameter(torch.ones(1))
    mark(parameter, marks.STEPS_IN_BACKWARD)
    unmark(parameter, marks.STEPS_IN_BACKWARD)
    assert not marked(parameter, marks.STEPS_IN_BACKWARD)
    unmark(parameter, marks.STEPS_IN_BACKWARD)  # it is gone already: nothing happens


def test_one_of_many():
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(3)]
    assert not any_marked(parameters, marks.STEPS_IN_BACKWARD)
    mark(parameters[2], marks.STEPS_IN_BACKWARD)
    assert any_marked(parameters, marks.STEPS_IN_BACKWARD)
