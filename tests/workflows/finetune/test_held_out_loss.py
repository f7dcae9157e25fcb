"""A batch of the held-out loss fits where the training fits."""

from unittest import mock

import pytest
import torch

from recipes_lib.fine_tuning.honest_evaluation import RowLosses
from recipes_lib.workflows.finetune import held_out_loss as measured_here
from recipes_lib.workflows.finetune.held_out_loss import held_out_loss
from tests.workflows.finetune.shared import change, make_rows

LOSSES = RowLosses(torch.tensor([2.0, 4.0]), torch.tensor([1, 1]))


@pytest.mark.parametrize(
    ("micro_batch_size", "longest", "batch_size"), [(1, 64, 1), (2, 64, 2), (2, 20, 6), (4, 9, 8)]
)
def test_a_batch_is_not_larger_than_one_of_the_training(micro_batch_size, longest, batch_size):
    """The mistake: eight rows at a time, where the training fits with one."""
    run = change(micro_batch_size=micro_batch_size)
    rows = make_rows(8, shortest=longest, longest=longest)
    with mock.patch.object(measured_here, "held_out_losses", return_value=LOSSES) as measured:
        held_out_loss(None, rows, "before", run=run, pad_token_id=0)
    assert measured.call_args.kwargs["batch_size"] == batch_size
