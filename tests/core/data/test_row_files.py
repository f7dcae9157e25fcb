"""Files as strangers have them: read as they are, or refused with the conversion to do."""

import csv
import gzip
import json

import pytest

from recipes_lib.core.data.row_files import read_rows

ROWS = [{"prompt": f"{i}?", "completion": f"0{i}"} for i in range(3)]
LINES = "\n".join(map(json.dumps, ROWS))
CSV = "prompt,completion\n" + "".join(f"{i}?,0{i}\n" for i in range(3))


def parquet(path):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)


def arrow(path):
    import pyarrow

    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as out:
        out.write_table(table)


def saved(path):
    from datasets import Dataset

    Dataset.from_list(ROWS).save_to_disk(path)


def saved_splits(path):
    from datasets import Dataset, DatasetDict

    DatasetDict(test=Dataset.from_list(ROWS[:1]), train=Dataset.from_list(ROWS)).save_to_disk(path)


def folder_of_files(path):
    path.mkdir()
    parquet(path / "train-00000-of-00001.parquet")


READ = {
    "lines.jsonl": LINES,
    "blank-lines.jsonl": f"\n{LINES}\n\n",
    "windows.jsonl": LINES.replace("\n", "\r\n"),
    "byte-order-mark.jsonl": b"\xef\xbb\xbf" + LINES.encode(),
    "list.json": json.dumps(ROWS),
    "indented.json": json.dumps(ROWS, indent=2),
    "packed.jsonl.gz": gzip.compress(LINES.encode()),
    "table.csv": CSV,
    "excel.csv": b"\xef\xbb\xbf" + CSV.replace(",", ";").encode(),
    "table.tsv": CSV.replace(",", "\t"),
    "table.csv.gz": gzip.compress(CSV.encode()),
    "table.parquet": parquet,
    "table.arrow": arrow,
    "saved": saved,
    "saved-splits": saved_splits,
    "folder": folder_of_files,
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
def test_what_datasets_reads_is_read(tmp_path, name):
    """The mistake: a decoder error for a list in one file, a table, or a mark before the text."""
    path = make(tmp_path, name, READ[name])
    assert [row for _, row in read_rows(path)] == ROWS


REFUSED = {
    "utf16.jsonl": (LINES.encode("utf-16"), "is in UTF-16, or no text at all: .*iconv -f UTF-16"),
    "unmarked.jsonl": (LINES.encode("utf-16-le"), "iconv -f UTF-16"),
    "latin.jsonl": (b'{"a": 1}\n{"a": "\xe4"}', r"latin\.jsonl, line 2: byte 0xe4 is not UTF-8"),
    "book.xlsx": (b"PK\x03\x04" + b"x" * 20, "save the sheet as CSV"),
    "packed.jsonl.zst": (b"\x28\xb5\x2f\xfd", "unzstd"),
    "cut.jsonl.gz": (gzip.compress(LINES.encode())[:30], "packed by gzip, and damaged"),
    "cut.parquet": (b"PAR1 and nothing else", "damaged Parquet"),
    "nested.json": (json.dumps({"version": 1, "data": ROWS}), r'json\.load.*\["data"\]'),
    "indented.json": (json.dumps({"data": ROWS}, indent=1), "one object whose rows are under"),
    "broken.json": ('[\n{"prompt": "a"},\n{"prompt" "b"}\n]', "line 3 column 11"),
    "broken.jsonl": ('{"prompt": "a"}\n{"prompt', r"broken\.jsonl, line 2 is no JSON"),
    "table.txt": (CSV, r"name a table of texts \.csv"),
    "more.csv": (CSV + "a,b,c\n", "line 5 has 3 fields, and the first line names 2"),
    "quote.csv": (CSV + '"a,b\n', "line 5 is no CSV"),
    "nothing.jsonl": ("", "no rows"),
    "header.csv": ("prompt,completion\n", "no rows"),
    "nothing.json": ("[]", "no rows"),
    "deep.json": ("[" * 100_000, "hundreds deep"),
    # The second column would take the place of the first in silence.
    "twice.csv": ("prompt,prompt,completion\na,b,c\n", "line 1 names 'prompt' twice"),
    "book.xls": (b"\xd0\xcf\x11\xe0" + b"x" * 20, "an old Office: save the sheet as CSV"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_everything_else_is_refused_with_what_to_do(tmp_path, name):
    content, error = REFUSED[name]
    path = make(tmp_path, name, content)
    with pytest.raises(ValueError, match=error) as caught:
        list(read_rows(path))
    assert str(path) in str(caught.value)


def test_a_folder_that_holds_no_data_is_refused(tmp_path):
    (tmp_path / "notes.md").write_text("# Notes")
    with pytest.raises(ValueError, match="cannot read a data set from the folder"):
        list(read_rows(tmp_path))
    with pytest.raises(ValueError, match="there is no file"):
        list(read_rows(tmp_path / "none.jsonl"))


def test_a_folder_of_several_formats_is_refused(tmp_path):
    """`load_dataset` reads the files of the most frequent format, and says nothing of the rest."""
    (tmp_path / "a.csv").write_text(CSV)
    assert len(list(read_rows(tmp_path))) == len(ROWS)
    (tmp_path / "b.jsonl").write_text(LINES)
    with pytest.raises(ValueError, match=r"several formats, a\.csv \(CSV\), b\.jsonl \(JSON\)"):
        list(read_rows(tmp_path))


def test_files_that_are_no_rows_are_not_of_another_format(tmp_path):
    """A hidden folder, as Jupyter makes it, and statistics beside files that a README names."""
    (tmp_path / "rows.jsonl").write_text(LINES)
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / ".ipynb_checkpoints" / "old.csv").write_text(CSV)
    assert len(list(read_rows(tmp_path))) == len(ROWS)
    (tmp_path / "statistics.csv").write_text(CSV)
    (tmp_path / "README.md").write_text("# Rows\n\n`data_files:` are not named here.\n")
    with pytest.raises(ValueError, match="several formats"):
        list(read_rows(tmp_path))
    named = "configs:\n- config_name: default\n  data_files: rows.jsonl\n"
    (tmp_path / "README.md").write_text(f"---\n{named}---\n")
    assert len(list(read_rows(tmp_path))) == len(ROWS)


def test_places_are_those_of_an_editor(tmp_path):
    """Lines from 1, with the blank ones; a text of a table may go over several lines."""
    lines = make(tmp_path, "a.jsonl", '\n{"a": 1}\n\n{"a": 2}\n')
    assert [place for place, _ in read_rows(lines)] == [f"{lines}, line 2", f"{lines}, line 4"]
    table = make(tmp_path, "a.csv", 'a,b\n"1\n2",3\n\n4,5\n')
    assert list(read_rows(table)) == [
        (f"{table}, line 2", {"a": "1\n2", "b": "3"}),
        (f"{table}, line 5", {"a": "4", "b": "5"}),
    ]
    whole = make(tmp_path, "a.json", json.dumps(ROWS))
    assert [place for place, _ in read_rows(whole)][1] == f"{whole}, row 1 (from 0)"


def test_a_long_text_of_a_table_is_read(tmp_path):
    """Python's own limit for a field is 128 KiB, and it is one for the whole process."""
    before = csv.field_size_limit()
    path = make(tmp_path, "long.csv", f"prompt,completion\na,{'b' * 200_000}\n")
    ((_, row),) = read_rows(path)
    assert len(row["completion"]) == 200_000
    assert csv.field_size_limit() == before
