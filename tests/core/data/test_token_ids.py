"""Token ids as users give them."""

import pytest
import torch

from recipes_lib.core.data.token_ids import stop_ids, token_row, token_rows


@pytest.mark.parametrize("tokens", [[3, 1], torch.tensor([3, 1]), torch.tensor([[3, 1]]).int()])
def test_one_row_in_any_form(tokens):
    """The mistake: a list becomes a column, or ids stay in 32 bits."""
    row = token_row(tokens, vocabulary=4)
    assert row.tolist() == [[3, 1]] and row.dtype == torch.int64


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[1, 2], [3, 1]], r"prompt has the shape \[2, 2\]: give token ids of one row"),
        ([], "token ids of one row, 1 or more"),
        ([1.5, 2], "the whole ones from 0 to 3"),
        ([1, 4], "holds numbers from 1 to 4, and the model knows the whole ones from 0 to 3"),
        ([-1, 1], "give the ids of the model's own tokenizer"),
    ],
)
def test_what_is_no_row_of_ids(tokens, message):
    """The mistake: an index error deep inside, or floats that are cut off without a word."""
    with pytest.raises(ValueError, match=message):
        token_row(tokens, vocabulary=4)


def test_several_texts():
    """The mistake: the message does not say which of many is wrong."""
    rows = token_rows(documents=[[1, 2], torch.tensor([[3, 1, 0]])], vocabulary=4, least=2)
    assert [row.tolist() for row in rows] == [[[1, 2]], [[3, 1, 0]]]
    with pytest.raises(ValueError, match="no documents: give at least one"):
        token_rows(documents=[], vocabulary=4)
    with pytest.raises(ValueError, match=r"documents\[1\] has the shape \[1, 1\]: .* 2 or more"):
        token_rows(documents=[[1, 2], [3]], vocabulary=4, least=2)


def test_what_ends_a_text():
    """The mistake: {tokenizer.eos_token_id} holds None, and the text never ends."""
    assert stop_ids(torch.tensor([2, 3])) == stop_ids(iter([2, 3])) == {2, 3}
    with pytest.raises(TypeError):
        stop_ids({None})
