import torch

from recipes_lib.core.model import marks
from recipes_lib.core.model.marks import mark, marked, unmark


def test_block_number_zero_is_a_mark_and_false_is_none():
    """The first block would look as if it were not checkpointed."""
    block = torch.nn.Linear(1, 1)
    mark(block, marks.CHECKPOINTED_INDEX, 0)
    assert marked(block, marks.CHECKPOINTED_INDEX)
    mark(block, marks.STEPS_IN_BACKWARD, False)
    assert not marked(block, marks.STEPS_IN_BACKWARD)
    unmark(block, marks.CHECKPOINTED_INDEX)
    unmark(block, marks.CHECKPOINTED_INDEX)  # it is gone already: nothing happens
    assert not marked(block, marks.CHECKPOINTED_INDEX)
