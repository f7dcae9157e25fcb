"""Rows become batches, and what they say of themselves is not dropped."""

import pytest

from recipes_lib.core.data import batches, collate
from recipes_lib.core.data.tokens_and_labels import IGNORED


def test_collate_and_batches():
    rows = [{"input_ids": [1, 2, 3], "labels": [IGNORED, 2, 3]}, {"input_ids": [4], "labels": [4]}]
    batch = collate(rows, pad_token_id=9, length=4)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 9], [4, 9, 9, 9]]
    assert set(batch) == {"input_ids", "labels"}
    assert batch["labels"].tolist() == [[IGNORED, 2, 3, IGNORED], [4, IGNORED, IGNORED, IGNORED]]
    stream = batches(rows * 2, batch_size=3, pad_token_id=9)
    assert next(stream)["input_ids"].shape == next(stream)["input_ids"].shape == (3, 3)


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"position_ids": [0, 0]}, "row 0 is packed, and its documents would read each other"),
        ({"attention_mask": [0, 1]}, "row 0 is padded .* read as text"),
        ({"attention_mask": [1, 0]}, "row 0 is padded"),  # and its padding has a label
        ({"labels": [1, 2, 3]}, "row 0 has 2 tokens and 3 labels"),
    ],
)
def test_what_a_row_says_of_itself_is_not_dropped(odd, message):
    """Borders and padding were dropped in silence: documents read each other."""
    row = {"input_ids": [1, 2], "labels": [1, 2], **odd}
    with pytest.raises(ValueError, match=message):
        collate([row], pad_token_id=0)
    # Padding behind the text and without labels, as `tokenizer(padding="max_length")` gives it.
    padded = {"input_ids": [1, 2, 0], "labels": [1, 2, -100], "attention_mask": [1, 1, 0]}
    assert collate([padded], pad_token_id=0)["labels"].tolist() == [[1, 2, -100]]
