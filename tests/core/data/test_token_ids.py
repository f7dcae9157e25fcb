"""Token ids as users give them."""

import pytest
import torch
from transformers import BatchEncoding

from recipes_lib.core.data.token_ids import check_batch, stop_ids, token_row, token_rows

ENCODED = BatchEncoding({"input_ids": [1, 2], "attention_mask": [1, 1]})


@pytest.mark.parametrize(
    "tokens", [[3, 1], (3, 1), torch.tensor([3, 1]), torch.tensor([[3, 1]]).int(), [[3, 1]]]
)
def test_one_row_in_any_form(tokens):
    row = token_row(tokens, vocabulary=4)
    assert row.tolist() == [[3, 1]] and row.dtype == torch.int64


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ("hello", r"prompt is a text: give token ids, which tokenizer\(text\)\[\"input_ids\"\]"),
        ({"input_ids": [1]}, 'prompt is of type dict: give token ids, .* its "input_ids"'),
        (ENCODED, 'of type BatchEncoding: give token ids, which stand in its "input_ids"'),
        (None, "prompt is of type NoneType, which makes no row"),
        (["a"], "prompt is of type list, which makes no row"),
        ([[1, 2], [3]], "prompt is of type list, which makes no row"),
        ([[1, 2], [3, 1]], r"prompt has the shape \[2, 2\]: give token ids of one row"),
        ([], "token ids of one row, at least one token"),
        (3, "prompt is a single number: give the token ids of one row as a list"),
        ([1.5, 2], "numbers of torch.float32: give token ids as whole numbers"),
        ([1, 4], "holds the id 4, and the model knows 4 tokens, from 0 to 3"),
        ([-1, 1], "holds the id -1, .* give the ids of the model's own tokenizer"),
        (torch.ones(3, device="meta").long(), "on the device meta, which holds no numbers"),
    ],
)
def test_what_is_no_row_of_ids(tokens, message):
    """The mistakes: an error from inside of PyTorch, or floats that are cut off without a word."""
    with pytest.raises(ValueError, match=message):
        token_row(tokens, vocabulary=4)


def test_several_texts():
    rows = token_rows(documents=[[1, 2], torch.tensor([[3, 1, 0]])], vocabulary=4, least=2)
    assert [row.tolist() for row in rows] == [[[1, 2]], [[3, 1, 0]]]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "no documents: give at least one"),
        ([1, 2, 3], r"documents\[0\] is a single number"),
        ([[1, 2], [3]], r"documents\[1\] .* at least 2 tokens"),
        ([[1, 2], [3, 9]], r"documents\[1\] holds the id 9"),
        ("text", "documents is a text: give a list of lists of token ids"),
        (ENCODED, "documents is of type BatchEncoding: give a list of lists"),
        (None, "documents is of type NoneType: give a list"),
    ],
)
def test_what_are_no_texts(texts, message):
    with pytest.raises(ValueError, match=message):
        token_rows(documents=texts, vocabulary=4, least=2)


def test_batches_that_a_model_can_read():
    ids = torch.tensor([[1, 2], [3, 0]])
    check_batch({"input_ids": ids}, vocabulary=4, name="batch 0")
    both = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    check_batch(BatchEncoding(both), vocabulary=4, name="batch 0")


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ("text", "batch 0 is of type str without input_ids: give dictionaries"),
        (torch.ones(2, 3), r"batch 0 is a tensor \[2, 3\] without input_ids"),
        ({"labels": torch.ones(2, 3)}, "batch 0 is of type dict without input_ids"),
        ({"input_ids": [[1, 2]]}, "input_ids of batch 0 is of type list: give a tensor"),
        ({"input_ids": torch.ones(3).long()}, r"a tensor \[3\]: give a tensor \[B, S\]"),
        ({"input_ids": torch.ones(1, 3)}, "numbers of torch.float32"),
        ({"input_ids": torch.full((1, 3), 9)}, "input_ids of batch 0 holds the id 9"),
        (
            {"input_ids": torch.ones(1, 3).long(), "attention_mask": torch.ones(1, 2)},
            r"attention_mask of batch 0 is a tensor \[1, 2\]: .* \[1, 3\]",
        ),
    ],
)
def test_batches_that_no_model_can_read(batch, message):
    with pytest.raises(ValueError, match=message):
        check_batch(batch, vocabulary=4, name="batch 0")


@pytest.mark.parametrize("stop", [[2, 3], {2, 3}, range(2, 4), torch.tensor([2, 3]), iter([2, 3])])
def test_any_collection_of_ids_ends_a_text(stop):
    """An iterator would be empty after the first look at it."""
    assert stop_ids(stop) == {2, 3}


@pytest.mark.parametrize("stop", [5, "a", None, [None], ["a"], [1.5], {1: 2}, [[1]]])
def test_what_ends_no_text(stop):
    """`{tokenizer.eos_token_id}` holds None for some tokenizers, and the text would never end."""
    with pytest.raises(ValueError, match=r"^stop=.*: give a collection of token ids"):
        stop_ids(stop)
