"""Tokens that a table does not hold, that are added to it, and at which a model stops."""

import pytest
import torch

from recipes_lib.core.model import load_tokenizer, model_of_shape
from recipes_lib.core.model.vocabulary import (
    check_vocabulary,
    grow_vocabulary,
    stop_at,
    stops_of,
    trainable_rows,
)

ROWS = [{"input_ids": [3, 5]}, {"input_ids": [4, 49151]}]


def test_a_token_beyond_the_table_is_named_with_the_line_that_mends_it():
    """The mistake: an index error deep inside an embedding, on a GPU without a name."""
    tokenizer = load_tokenizer()
    check_vocabulary(ROWS, tokenizer=tokenizer, size=49152)
    with pytest.raises(ValueError, match="a row has token 49151"):
        check_vocabulary(ROWS, tokenizer=tokenizer, size=49151)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    mended = r"padding has token 49152 .*--add-token '\[PAD\]'.*resize_token_embeddings\(49153\)"
    with pytest.raises(ValueError, match=mended):
        check_vocabulary(ROWS, tokenizer=tokenizer, size=49152)


BEYOND = [130, 128]  # the table; 100 is in it


@pytest.mark.parametrize(("tied", "tokens"), [(True, BEYOND), (False, BEYOND), (True, [100])])
def test_new_rows_are_the_mean_of_those_that_were_there(tied, tokens):
    """The mistake: rows of random numbers, or only one of two tables grown."""
    torch.manual_seed(0)
    model = model_of_shape("tiny-llama", device="cpu")
    model.config.tie_word_embeddings = tied
    if tied:
        model.tie_weights()
    else:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    tables = [model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()]
    kept = [row for row in range(128) if row not in tokens]
    means = [table[kept].mean(0) for table in tables]
    first = [table[3].clone() for table in tables]
    grow_vocabulary(model, {f"<{token}>": token for token in tokens})
    assert model.config.vocab_size == max(128, max(tokens) + 1)
    new = [model.model.embed_tokens.weight, model.lm_head.weight]
    assert (new[0] is new[1]) == tied
    for table, mean, row in zip(new, means, first, strict=True):
        for token in tokens:
            torch.testing.assert_close(table[token], mean)
        assert torch.equal(table[3], row)
    names = ["embed_tokens"] if tied else ["embed_tokens", "lm_head"]
    assert trainable_rows(model) == dict.fromkeys(names, sorted(tokens))


def test_a_model_stops_at_what_it_has_learnt_and_where_it_stopped():
    model, tokenizer = model_of_shape("tiny-llama", device="cpu"), load_tokenizer()
    model.generation_config.eos_token_id = 0
    stop_at(model, tokenizer, [1])
    assert stops_of(model) == model.config.eos_token_id == [1, 0]
    assert tokenizer.eos_token == "<|im_start|>"
    stop_at(model, tokenizer, [])
    assert stops_of(model) == [1, 0]
