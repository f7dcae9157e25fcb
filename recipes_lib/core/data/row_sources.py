"""Rows of a local file, of the hub or of a list, each with the place where it stands.

    for place, row in placed_rows("pairs.jsonl"):
        ...                      # "pairs.jsonl, line 7", {"prompt": …, "completion": …}

    JSON Lines, a JSON list   by Python's `json`; `datasets` would make dates of some of the texts
    CSV, TSV                  as texts: "007" stays "007"
    TXT                       one text, to train on as it stands
    Parquet                   by `datasets`

The first three may be packed by gzip. A text is UTF-8. Lines count from 1, as editors count them.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

PlacedRow = tuple[str, Any]  # the place in words, and what stands there


def placed_rows(dataset: str | Iterable[Any], *, split: str = "train") -> Iterator[PlacedRow]:
    """The rows of a file, of a data set of the hub, or those that are given."""
    if isinstance(dataset, str) and not _is_a_path(dataset):
        for place, row in _numbered_rows(_read_hub(dataset, split)):
            yield f"{dataset}, {place}", _without_nulls(row)
        return
    if split != "train":
        raise ValueError(
            f"split={split!r}: these pairs have no splits: "
            f"give the held-out ones as a data set of their own"
        )
    if isinstance(dataset, str):
        yield from read_rows(dataset)
    else:
        yield from _numbered_rows(dataset)


def _is_a_path(name: str) -> bool:
    """Whether `name` is a file, or no name of the hub: those have at most one slash, no ending."""
    path = Path(name).expanduser()
    return path.exists() or name.count("/") > 1 or path.suffix in (*READERS, ".gz")


def read_rows(path: str | Path) -> Iterator[PlacedRow]:
    """The rows of the file `path`, each with its place in words, as it stands there."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise ValueError(f"there is no file {path}: check the path")
    try:
        rows = list(_reader_of_file(path)(path))
    except Exception as error:  # of many types: an encoding, a missing quote, damaged bytes
        raise ValueError(f"{path} cannot be read: {_reason(error)}") from error
    if not rows:
        raise ValueError(
            f"{path} is empty (no rows): give rows with `prompt` and `completion`, or `messages`"
        )
    for place, row in rows:
        yield f"{path}, {place}", row


def _reader_of_file(path: Path) -> Callable[[Path], Iterator[PlacedRow]]:
    endings = [ending.lower() for ending in path.suffixes if ending.lower() != ".gz"]
    reader = READERS.get(endings[-1]) if endings else None
    if reader is None:
        raise ValueError(f"name it after what it is: {', '.join(READERS)}")
    return reader


def _reason(error: BaseException) -> str:
    """What was wrong with a file or data set at first, in one line, without what wraps it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return next(iter(str(error).splitlines()), type(error).__name__)


def _numbered_rows(rows: Any) -> Iterator[PlacedRow]:
    for number, row in enumerate(rows):
        yield f"row {number} (from 0)", row


def _without_nulls(value: Any) -> Any:
    """A value of a file's table without nulls inside: Arrow gives each object the fields of all."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    return value


# --- texts ----------------------------------------------------------------------------------------


def _read_text(path: Path) -> str:
    """The text of a file, without a byte-order mark."""
    data = path.read_bytes()
    if path.suffix.lower() == ".gz":
        data = gzip.decompress(data)
    return data.decode("utf-8-sig")


def _read_json(path: Path) -> Iterator[PlacedRow]:
    """A file of JSON: one list of rows, or a row in each line."""
    text = _read_text(path)
    if text.lstrip().startswith("["):
        yield from _numbered_rows(json.loads(text))
        return
    # `splitlines` would also cut at characters that JSON allows inside a text.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield f"line {number}", json.loads(line)
        except ValueError as error:
            raise ValueError(f"line {number} is no JSON ({error}): mend it") from None


def _read_whole(path: Path) -> Iterator[PlacedRow]:
    text = _read_text(path)
    if text.strip():
        yield "the whole text", {"text": text}


def _read_table(path: Path) -> Iterator[PlacedRow]:
    """Rows of a CSV or TSV file, each under the names of the first line."""
    text = _read_text(path)
    names = text.partition("\n")[0]
    separator = max(",\t;", key=names.count)  # what stands between the names
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # a long text is no mistake
    table = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    for row in table:
        if None in row or None in row.values():
            raise ValueError(
                f"line {table.line_num} has another number of fields than the first line names: "
                f"put a text with commas or line breaks between double quotes"
            )
        yield f"line {table.line_num}", row


# --- by the library `datasets` --------------------------------------------------------------------


def _read_parquet(path: Path) -> Iterator[PlacedRow]:
    from datasets import Dataset

    yield from _numbered_rows(map(_without_nulls, Dataset.from_parquet(os.fspath(path))))


def _read_hub(name: str, split: str) -> Iterable[Any]:
    """The rows of a data set of the hub; ValueError where it cannot be loaded."""
    from datasets import load_dataset

    try:
        return load_dataset(name, split=split)
    except Exception as error:  # of many types: a missing name, split, network or token
        raise ValueError(
            f"cannot load split {split!r} of the data set {name!r} ({error}): give the path of a "
            f"file with `prompt` and `completion`, or a hub id that this machine can reach"
        ) from error


READERS = {".jsonl": _read_json, ".json": _read_json, ".csv": _read_table, ".tsv": _read_table}
READERS |= {".parquet": _read_parquet, ".txt": _read_whole}
