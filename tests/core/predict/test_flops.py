"""The operations of a step, against PyTorch's own counter of what its operators multiply."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from recipes_lib.core.model import model_of_shape
from recipes_lib.core.predict.flops import step_operations

ROWS, LENGTH = 2, 64


@pytest.mark.parametrize("family", ["tiny-mistral", "tiny-gpt2"])
def test_operations_are_those_that_pytorch_counts(family):
    """The mistakes: a tied output layer that is left out, ungrouped heads, Conv1D as no layer."""
    model = model_of_shape(family, device="cpu")
    model.set_attn_implementation("eager")  # whose products are plain ones, of the whole square
    ids = torch.randint(0, model.config.vocab_size, (ROWS, LENGTH))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    by_operator = counter.get_flop_counts()["Global"]
    of_scores = by_operator.pop(torch.ops.aten.bmm)
    # Half of the square counts: nobody sees what comes later.
    counted = sum(by_operator.values()) + of_scores * (LENGTH + 1) / (2 * LENGTH)
    assert step_operations(model, rows=ROWS, length=LENGTH) == pytest.approx(counted, rel=0.01)
