"""Files as strangers have them: read as they are, or refused by name."""

import gzip
import json

import pytest

from recipes_lib.core.data.row_sources import read_rows

# The mistake: numbers and dates are made of texts that look like them.
ROWS = [{"prompt": f"{i}?", "completion": f"2024-01-0{i}"} for i in range(1, 4)]
LINES = "\n".join(map(json.dumps, ROWS))
CSV = "prompt,completion\n" + "".join(",".join(row.values()) + "\n" for row in ROWS)


def parquet(path):
    from datasets import Dataset

    Dataset.from_list(ROWS).to_parquet(path)


READ = {
    "list.json": json.dumps(ROWS, indent=2),
    "packed.jsonl.gz": gzip.compress(LINES.encode()),
    "excel.csv": b"\xef\xbb\xbf" + CSV.replace(",", ";").encode(),
    "table.tsv": CSV.replace(",", "\t"),
    "table.parquet": parquet,
}


def make(folder, name, content):
    path = folder / name
    if callable(content):
        content(path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content, newline="")
    return path


@pytest.mark.parametrize("name", READ)
def test_rows_are_read_as_they_stand(tmp_path, name):
    """The mistake: the answer "00" of a table becomes the number 0, or a mark joins a name."""
    path = make(tmp_path, name, READ[name])
    assert [row for _, row in read_rows(path)] == ROWS


def test_a_text_is_one_row_and_objects_of_a_table_keep_their_own_fields(tmp_path):
    """The mistake: Arrow gives the arguments of one call those of all others, as nulls."""
    from datasets import Dataset

    assert [row for _, row in read_rows(make(tmp_path, "book.txt", "One.\n\nTwo."))] == [
        {"text": "One.\n\nTwo."}
    ]
    rows = [{"call": {"city": "Oslo"}}, {"call": {"unit": "K"}}]
    Dataset.from_list(rows).to_parquet(tmp_path / "calls.parquet")
    assert [row for _, row in read_rows(tmp_path / "calls.parquet")] == rows


def test_places_are_those_of_an_editor(tmp_path):
    """Lines from 1, with the blank ones."""
    lines = make(tmp_path, "a.jsonl", '\n{"a": 1}\n\n{"a": 2}\n')
    assert [place for place, _ in read_rows(lines)] == [f"{lines}, line 2", f"{lines}, line 4"]
    table = make(tmp_path, "a.csv", CSV)
    assert next(read_rows(table))[0] == f"{table}, line 2"


REFUSED = {
    "latin.jsonl": (b'{"a": 1}\n{"a": "\xe4"}', "cannot be read"),
    "book.xlsx": (b"PK\x03\x04", r"name it after what it is: \.jsonl"),
    "more.csv": (CSV + "a,b,c\n", "line 5 has another number of fields"),
    "header.csv": ("prompt,completion\n", "no rows"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_with_the_name_of_the_file(tmp_path, name):
    content, error = REFUSED[name]
    path = make(tmp_path, name, content)
    with pytest.raises(ValueError, match=error) as caught:
        list(read_rows(path))
    assert str(path) in str(caught.value)
