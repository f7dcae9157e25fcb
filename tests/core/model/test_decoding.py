"""Token ids, and the greedy loop over any decoder."""

import pytest
import torch

from recipes_lib.core.model.decoding import (
    KeyValueCache,
    greedy,
    stop_ids,
    token_row,
)

# --- token ids ------------------------------------------------------------------------------------


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


# --- the greedy loop ------------------------------------------------------------------------------


class Counting:
    """A decoder that answers with the last token plus one, and notes what it was given."""

    vocabulary = 10

    def __init__(self):
        self.given = []

    def new_cache(self, *, batch=1, max_tokens):
        self.capacity = max_tokens
        return KeyValueCache(layers=1, kv_heads=1, head_dim=2, capacity=max_tokens)

    def __call__(self, tokens, cache, *, last_only=False, row_by_row=False):
        self.given.append(tokens.tolist()[0])
        cache.reserve(tokens.shape[1])
        cache.advance(tokens.shape[1])
        return torch.nn.functional.one_hot(tokens[:, -1:] + 1, 10).float()


def test_each_token_is_read_once():
    decoder = Counting()
    assert greedy(decoder, [3, 1], new_tokens=4) == [2, 3, 4, 5]
    assert decoder.given == [[3, 1], [2], [3], [4]]
    assert decoder.capacity == 6


def test_a_stop_token_ends_the_answer_and_belongs_to_it():
    assert greedy(Counting(), [1], new_tokens=6, stop={4}) == [2, 3, 4]
