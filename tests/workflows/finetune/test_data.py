"""What is held out is not trained on, and bad data is refused before any compute."""

import json
import re

import pytest

from recipes_lib.core.model import load_tokenizer
from recipes_lib.workflows.finetune import data
from recipes_lib.workflows.finetune.data import load_data
from tests.workflows.finetune.shared import change


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


def pairs_of(numbers):
    return [{"prompt": f"{i} + {i}?", "completion": f"It is {2 * i}."} for i in numbers]


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def run_of(path, **values):
    return change(data_file=str(path), seq_len=64, **values)


def test_every_tenth_pair_is_held_out(tokenizer, tmp_path):
    path = write(tmp_path / "pairs.jsonl", pairs_of(range(40)))
    trained, rows, held_out = load_data(tokenizer, run=run_of(path))
    assert trained == pairs_of(i for i in range(40) if i % 10)
    assert (len(rows), len(held_out)) == (36, 4)
    limited, _, _ = load_data(tokenizer, run=run_of(path), limit=20)
    assert len(limited) == 18


def test_what_is_held_out_is_not_trained_on(tokenizer, tmp_path, capsys):
    path = write(tmp_path / "pairs.jsonl", pairs_of(range(40)))
    held_out_file = write(tmp_path / "held_out.jsonl", pairs_of(range(5)))
    trained, rows, held_out = load_data(
        tokenizer, run=run_of(path), held_out_file=str(held_out_file)
    )
    assert trained == pairs_of(range(5, 40))
    assert (len(rows), len(held_out)) == (35, 5)
    assert "held out too: 5 pairs" in capsys.readouterr().out


def test_pairs_of_the_standard_library_are_left_out_where_they_are_long(tokenizer, monkeypatch):
    """They are not refused, as those of a file are: of these there are enough."""
    long = {"prompt": "a", "completion": "b " * 200}

    def found(*, split="train", dataset=None):
        if dataset is not None:
            return dataset
        return [long, *pairs_of(range(100))]

    monkeypatch.setattr(data, "load_pairs", found)
    trained, rows, held_out = load_data(tokenizer, run=change(seq_len=64), limit=24)
    assert trained == pairs_of(range(24))
    assert (len(rows), len(held_out)) == (24, 3)


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ([], "(no rows)"),
        ([*pairs_of(range(31)), {"prompt": "a", "completion": "b " * 200}], "longer than seq_len"),
        ([{"text": "a"}], "`prompt` and `completion` are needed"),
        (pairs_of(range(5)), "1 held-out rows: give 20 pairs or more"),
        ([{"prompt": "a", "completion": "b"}] * 30, "data set is empty"),  # all are held out
    ],
    ids=["no rows", "long", "columns", "few", "repeated"],
)
def test_bad_data_is_refused(tokenizer, tmp_path, rows, error):
    path = write(tmp_path / "pairs.jsonl", rows)
    with pytest.raises(ValueError, match=re.escape(error)):
        load_data(tokenizer, run=run_of(path))


def test_bad_options_are_refused(tokenizer, tmp_path):
    path = write(tmp_path / "pairs.jsonl", pairs_of(range(40)))
    with pytest.raises(ValueError, match="give the file of pairs to train on"):
        load_data(tokenizer, run=change(data_file=""), held_out_file=str(path))
    with pytest.raises(ValueError, match="limit=0"):
        load_data(tokenizer, run=run_of(path), limit=0)
