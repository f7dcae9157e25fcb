"""Token ids that a decoder is given, and those at which it stops."""

import pytest
import torch

from recipes_lib.core.model.decoding import (
    stop_ids,
    token_row,
)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[1, 2], [3, 1]], r"prompt has the shape \[2, 2\]: give token ids of one row"),
        ([], "token ids of one row, 1 or more"),
        ([1.5, 2], "the whole ones from 0 to 3"),
        ([1, 4], "holds numbers from 1 to 4, and the model knows the whole ones from 0 to 3"),
    ],
)
def test_what_is_no_row_of_ids(tokens, message):
    """The mistake: an index error deep inside, or floats that are cut off without a word."""
    with pytest.raises(ValueError, match=message):
        token_row(tokens, vocabulary=4)


def test_what_ends_a_text():
    """The mistake: {tokenizer.eos_token_id} holds None, and the text never ends."""
    assert stop_ids(torch.tensor([2, 3])) == {2, 3}
    with pytest.raises(TypeError):
        stop_ids({None})
