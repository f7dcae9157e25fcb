"""Pairs are read and checked, whatever they come from."""

import json

import pytest

from recipes_lib.core.data import load_instructions, load_pairs
from recipes_lib.core.data.tokens_and_labels import decode_with_mask
from recipes_lib.core.model import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


def test_instructions(tokenizer):
    data = load_instructions(tokenizer, max_tokens=96, limit=20)
    again = load_instructions(tokenizer, max_tokens=96, limit=20)
    assert len(data) == 20 and data[:] == again[:]
    assert max(map(len, data["input_ids"])) <= 96
    assert "docstring of this Python function" in decode_with_mask(data[0], tokenizer)


PAIR = {"prompt": "a", "completion": "b"}


def test_own_pairs_and_files(tokenizer, tmp_path):
    """The mistakes: the same rows are trained on and held out; nothing is left of a data set."""
    pairs = [PAIR, {"prompt": "long " * 9, "completion": "b"}]
    for source in (pairs, write(tmp_path, *pairs)):
        assert len(load_instructions(tokenizer, max_tokens=40, dataset=source)) == 1
        with pytest.raises(ValueError, match="have no splits"):
            load_instructions(tokenizer, split="validation", dataset=source)
        with pytest.raises(ValueError, match="no pair is left"):
            load_instructions(tokenizer, max_tokens=5, dataset=source)


def write(folder, *lines):
    path = folder / "pairs.jsonl"
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return str(path)


@pytest.mark.parametrize("line", ["{not json", {"prompt": "x"}], ids=str)
def test_a_malformed_row_is_named(tmp_path, line):
    with pytest.raises(ValueError, match=r"pairs\.jsonl\D*2\b"):
        list(load_pairs(dataset=write(tmp_path, PAIR, line, PAIR)))


def test_pairs_that_cannot_be_learnt_are_named(tokenizer, tmp_path):
    chat = [{"role": "user", "content": "2 + 2?"}, {"role": "critic", "content": "Four."}]
    with pytest.raises(
        ValueError, match=r"no 'assistant' .* in \['user', 'critic'\] \(in .*2 \+ 2"
    ):
        load_instructions(tokenizer, dataset=[PAIR, {"messages": chat}])
    with pytest.warns(UserWarning, match="empty: 2 pairs"):
        rows = load_instructions(
            tokenizer,
            dataset=write(tmp_path, PAIR, PAIR | {"completion": " "}, {**PAIR, "completion": ""}),
        )
    assert len(rows) == 1
