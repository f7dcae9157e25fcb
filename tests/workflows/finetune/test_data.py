"""What is held out is not trained on, and bad data is refused before any compute."""

import json
import re
from dataclasses import replace

import pytest

from recipes_lib.core.data import rows_of
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
    return change(data_files=[str(path)], seq_len=64, **values)


def test_columns_that_the_user_names(tokenizer, tmp_path):
    """The mistakes: a name that is not there; two columns for one thing."""
    rows = [{"q": pair["prompt"], "a": pair["completion"]} for pair in pairs_of(range(20))]
    path = write(tmp_path / "pairs.jsonl", rows)
    columns = {"prompt": "q", "completion": "a"}
    assert load_data(tokenizer, run=run_of(path), columns=columns).pairs[0] == pairs_of([1])[0]
    with pytest.raises(ValueError, match=r"line 1: a row has the columns \['a', 'q'\], and no `b`"):
        load_data(tokenizer, run=run_of(path), columns={"prompt": "b"})
    path = write(tmp_path / "two.jsonl", [row | {"prompt": "x"} for row in rows])
    with pytest.raises(ValueError, match="`prompt` beside `q`"):
        load_data(tokenizer, run=run_of(path), columns=columns)


def test_every_tenth_pair_is_held_out(tokenizer, tmp_path):
    path = write(tmp_path / "pairs.jsonl", pairs_of(range(40)))
    found = load_data(tokenizer, run=run_of(path))
    assert found.pairs == pairs_of(i for i in range(40) if i % 10)
    assert (len(found.rows), len(found.held_out)) == (36, 4)
    assert len(load_data(tokenizer, run=run_of(path), limit=20).pairs) == 18


def test_what_is_held_out_is_not_trained_on(tokenizer, tmp_path, capsys):
    path = write(tmp_path / "pairs.jsonl", pairs_of(range(40)))
    held_out_file = write(tmp_path / "held_out.jsonl", pairs_of(range(5)))
    found = load_data(tokenizer, run=run_of(path), held_out_file=str(held_out_file))
    assert found.pairs == pairs_of(range(5, 40))
    assert (len(found.rows), len(found.held_out)) == (35, 5)
    assert "held out too: 5 pairs" in capsys.readouterr().out


def test_pairs_of_the_standard_library_are_left_out_where_they_are_long(tokenizer, monkeypatch):
    """They are not refused, as those of a file are: of these there are enough."""
    long = {"prompt": "a", "completion": "b " * 200}

    def found(*, split="train", dataset=None):
        if dataset is not None:
            return dataset
        return [long, *pairs_of(range(100))]

    monkeypatch.setattr(data, "load_pairs", found)
    found = load_data(tokenizer, run=change(seq_len=64), limit=24)
    assert found.pairs == pairs_of(range(24))
    assert (len(found.rows), len(found.held_out)) == (24, 3)


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ([], "(no rows)"),
        ([{"story": "a"}], "`prompt` and `completion` are needed"),
        (pairs_of(range(5)), "1 held-out rows: give 20 pairs or more"),
        ([{"prompt": "a", "completion": "b"}] * 30, "no pair is left to train on"),
    ],
    ids=["no rows", "columns", "few", "repeated"],
)
def test_bad_data_is_refused(tokenizer, tmp_path, rows, error):
    """The mistake: no row is left to train on, or none to prove anything with."""
    path = write(tmp_path / "pairs.jsonl", rows)
    with pytest.raises(ValueError, match=re.escape(error)):
        load_data(tokenizer, run=run_of(path))


LONG = {"prompt": "long", "completion": "b " * 80}
LONGER = {"prompt": "longer", "completion": "b " * 200}


@pytest.fixture
def with_long_rows(tokenizer, tmp_path):
    """Pairs of which line 11, held out, and line 14 are longer than 64 tokens."""
    rows = pairs_of(range(40))
    rows[10] = LONGER
    rows[13] = LONG
    path = write(tmp_path / "pairs.jsonl", rows)
    return path, len(rows_of(tokenizer, LONGER)[0]["input_ids"])


def test_the_longest_row_is_named_by_its_line(tokenizer, with_long_rows):
    """The mistake: the first long row of those behind the split, and none that is held out."""
    path, length = with_long_rows
    error = rf"2 of 40 rows .*longest is {path}, line 11 with {length} tokens. --seq-len auto "
    with pytest.raises(ValueError, match=error):
        load_data(tokenizer, run=run_of(path))


def test_a_long_row_of_the_held_out_file_is_refused(tokenizer, tmp_path):
    """The mistake: only rows to train on are checked, and 10 MB in one line take all memory."""
    path = write(tmp_path / "pairs.jsonl", pairs_of(range(40)))
    held_out = write(tmp_path / "held_out.jsonl", [*pairs_of(range(40, 45)), LONG])
    with pytest.raises(ValueError, match=rf"the longest is {held_out}, line 6 with"):
        load_data(tokenizer, run=run_of(path), held_out_file=str(held_out))


def test_all_rows_may_be_too_long(tokenizer, tmp_path):
    """The mistake: an IndexError where the first row to learn is shown."""
    path = write(tmp_path / "pairs.jsonl", [LONG])
    held_out = write(tmp_path / "held_out.jsonl", pairs_of(range(5)))
    with pytest.raises(ValueError, match="0 rows to train on and 5 held-out rows: give"):
        load_data(tokenizer, run=run_of(path), held_out_file=str(held_out), drop_long=True)


def test_the_length_is_found_or_long_rows_are_left_out(tokenizer, with_long_rows, capsys):
    path, length = with_long_rows
    found = load_data(tokenizer, run=run_of(path), longest=True)
    assert found.run == replace(run_of(path), seq_len=length)
    assert (len(found.rows), len(found.held_out)) == (36, 4)
    assert f"seq_len {length}: the longest row is {path}, line 11" in capsys.readouterr().out

    found = load_data(tokenizer, run=run_of(path), drop_long=True)
    assert found.run.seq_len == 64
    assert (len(found.pairs), len(found.rows), len(found.held_out)) == (35, 35, 3)
    assert LONG not in found.pairs
    said = capsys.readouterr().out
    assert "left out: 2 of 40 rows" in said and f"the longest is {path}, line 11 with" in said


def test_a_pair_that_cannot_be_learnt_is_named_by_its_line(tokenizer, tmp_path, capsys):
    """The mistake: a number that the split has given it, or none."""
    chat = {"messages": [{"role": "user", "content": "2 + 2?"}]}
    path = write(tmp_path / "chat.jsonl", [*pairs_of(range(24)), chat])
    with pytest.raises(ValueError, match=rf"{path}, line 25: nothing to learn"):
        load_data(tokenizer, run=run_of(path))

    marks = {"prompt": "?", "completion": "<|im_start|>"}
    path = write(tmp_path / "marks.jsonl", [*pairs_of(range(24)), marks])
    with pytest.raises(ValueError, match=rf"{path}, line 25: the row learns tokens of the templ"):
        load_data(tokenizer, run=run_of(path))

    path = write(
        tmp_path / "empty.jsonl", [*pairs_of(range(24)), {"prompt": "?", "completion": ""}]
    )
    load_data(tokenizer, run=run_of(path))
    assert f"1 pairs, the first of them {path}, line 25" in capsys.readouterr().out


def test_several_files_are_all_read(tokenizer, tmp_path):
    """The mistake: the last one wins."""
    files = [write(tmp_path / f"{i}.jsonl", pairs_of(range(20 * i, 20 * i + 20))) for i in (0, 1)]
    found = load_data(tokenizer, run=change(data_files=list(map(str, files)), seq_len=64))
    assert found.pairs == pairs_of(i for i in range(40) if i % 10)


def test_answers_that_are_not_to_be_learnt(tokenizer, tmp_path, capsys):
    """The mistake: a conversation whose answers all say no is refused, or learnt."""
    masked = [{"from": "human", "value": "2?"}, {"from": "gpt", "value": "3", "weight": 0}]
    path = write(tmp_path / "chat.jsonl", [*pairs_of(range(24)), {"conversations": masked}])
    assert len(load_data(tokenizer, run=run_of(path)).rows) == 21
    assert f"1 pairs, the first of them {path}, line 25" in capsys.readouterr().out


def test_texts_are_learnt_whole_and_cut_into_rows(tokenizer, tmp_path):
    """The mistake: the end of a part is learnt as the end of a text."""
    text = " ".join(f"word{i}" for i in range(400))
    book = tmp_path / "book.txt"
    book.write_text(text)
    found = load_data(tokenizer, run=run_of(book))  # every tenth part of the only text is held out
    rows = [*found.held_out[:1], *found.rows[:9]]
    assert all(row["labels"] == row["input_ids"] and len(row["labels"]) == 64 for row in rows)
    assert tokenizer.decode([token for row in rows for token in row["input_ids"]]) in text
    every = [row["input_ids"][-1] for row in [*found.rows, *found.held_out]]
    assert every.count(tokenizer.eos_token_id) == 1

    path = write(tmp_path / "text.jsonl", [{"text": f"{i} {text}"} for i in range(20)])
    found = load_data(tokenizer, run=run_of(path))
    assert [pair["text"].split()[0] for pair in found.pairs] == [
        str(i) for i in range(20) if i % 10
    ]
    assert found.ends == [tokenizer.eos_token_id]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("", "neither the chat template nor the tokenizer ends an answer"),
        (
            "{% for m in messages %}[{{ m.role }}] {{ m.content }}</a>{% endfor %}",
            "--add-token '</a>'",
        ),
    ],
)
def test_a_model_that_will_never_stop_is_said_before_training(tmp_path, capsys, template, said):
    tokenizer = load_tokenizer()
    tokenizer.eos_token = None
    tokenizer.chat_template = template or None
    path = write(tmp_path / "pairs.jsonl", pairs_of(range(20)))
    assert load_data(tokenizer, run=run_of(path)).ends == []
    assert said in capsys.readouterr().out


def test_options_that_need_pairs_of_ones_own(tokenizer):
    """The mistake: an evaluation on a file that the command never reads."""
    for options in ({"held_out_file": "pairs.jsonl"}, {"longest": True}):
        with pytest.raises(ValueError, match="need pairs to train on: give --data"):
            load_data(tokenizer, run=change(data_files=[]), **options)
