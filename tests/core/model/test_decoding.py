"""The cache of keys and values, and the greedy loop over any decoder."""

import pytest
import torch

from recipes_lib.core.model.decoding import (
    KeyValueCache,
    greedy,
    stop_ids,
    token_row,
)


def cache_of(capacity=6, batch=1):
    return KeyValueCache(layers=2, kv_heads=3, head_dim=4, capacity=capacity, batch=batch)


def test_positions_and_mask_without_padding():
    cache = cache_of()
    assert cache.positions(3).tolist() == [0, 1, 2]
    assert cache.mask(3) is None, "the first call is plain causal attention"
    cache.advance(2)
    assert cache.mask(1) is None, "one token looks at everything"
    assert cache.positions(2).tolist() == [2, 3]
    assert cache.mask(2)[0, 0].int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


def test_positions_and_mask_with_padding_on_the_left():
    cache = cache_of(batch=2)
    cache.starts = torch.tensor([0, 2])
    assert cache.positions(3).tolist() == [[0, 1, 2], [0, 0, 0]]
    # A padding token sees itself, so that no softmax is over nothing.
    assert cache.mask(3)[1, 0].int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    cache.advance(3)
    assert cache.positions(1).tolist() == [[3], [1]]
    assert cache.mask(1)[:, 0, 0].int().tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]


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
