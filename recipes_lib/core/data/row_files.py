"""Rows of a local file or folder, whatever its format, each with the place where it stands.

    for place, row in read_rows("pairs.jsonl"):
        ...                      # "pairs.jsonl, line 7", {"prompt": …, "completion": …}

What is read is what the library `datasets` reads as well:

    JSON Lines               one object in each line
    JSON                     one list of objects
    CSV, TSV                 a line of names, then texts: "007" stays "007"
    Parquet, Arrow           one file
    a saved data set         the folder that `save_to_disk` wrote
    a folder of data files   as `load_dataset` reads it

Each of the first four may be packed by gzip. A text is UTF-8. Everything else is refused, with the
conversion to do. Lines count from 1, as editors count them. Rows of a format without lines count
from 0, as Python does.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

PlacedRow = tuple[str, Any]  # the place in words, and what stands there

# The first bytes of what is no text, and what to do with it.
PARQUET = b"PAR1"
ARROW_FILE = b"ARROW1"
ARROW_STREAM = b"\xff\xff\xff\xff"
GZIP = b"\x1f\x8b"
REFUSED = {
    b"PK\x03\x04": "is a zip file or an Excel sheet: unpack it, or save the sheet as CSV (UTF-8)",
    b"\x28\xb5\x2f\xfd": "is packed by zstd: unpack it with `unzstd {name}`",
    b"\xfd7zXZ": "is packed by xz: unpack it with `unxz {name}`",
    b"BZh": "is packed by bzip2: unpack it with `bunzip2 {name}`",
    b"\xd0\xcf\x11\xe0": "is a document of an old Office: save the sheet as CSV (UTF-8)",
    b"SQLite format 3": "is an SQLite database: write the table as CSV",
}
# The formats by the endings of names.
FORMATS = {".csv": "CSV", ".tsv": "CSV", ".json": "JSON", ".jsonl": "JSON"}
FORMATS |= {".parquet": "Parquet", ".arrow": "Arrow"}
UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # its byte-order marks

# --- a file or a folder ---------------------------------------------------------------------------


def read_rows(path: str | Path, *, split: str = "train") -> Iterator[PlacedRow]:
    """The rows of `path`, one after the other: the place in words, and the row as it stands there.

    A row is a dictionary where the format has columns, and any JSON value in a JSON file.

    Args:
        split: which split to take where a folder has several.
    Raises ValueError for a path that is not there, for a file without rows, and for a format or an
    encoding that is not read. The message says how to convert it.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise ValueError(f"there is no file {path}: check the path")
    if path.is_dir():
        rows = _of_folder(path, split)
    else:
        rows = _of_file(path)
    count = 0
    for placed in rows:
        count += 1
        yield placed
    if count == 0:
        raise ValueError(
            f"{path} is empty (no rows): give rows with `prompt` and `completion`, or `messages`"
        )


def _of_file(path: Path) -> Iterable[PlacedRow]:
    with path.open("rb") as file:
        head = file.read(16)
    if head.startswith(PARQUET):
        return _numbered(path, _parquet_rows(path))
    if head.startswith((ARROW_FILE, ARROW_STREAM)):
        return _numbered(path, _arrow_rows(path, head))
    for begin, advice in REFUSED.items():
        if head.startswith(begin):
            raise ValueError(f"{path} {advice.format(name=path)}")

    names = [suffix.lower() for suffix in path.suffixes]
    data = path.read_bytes()
    if head.startswith(GZIP):
        data = _unpacked(path, data)
        names = [name for name in names if name != ".gz"]
    text = _decoded(path, data)
    if names and names[-1] in (".csv", ".tsv"):
        return _csv_rows(path, text)
    return _json_rows(path, text)


def _numbered(path: Path, rows: Iterable[Any]) -> Iterator[PlacedRow]:
    for number, row in enumerate(rows):
        yield f"{path}, row {number} (from 0)", row


def _unpacked(path: Path, data: bytes) -> bytes:
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(
            f"{path} is packed by gzip, and damaged ({error}): fetch or pack it again"
        ) from error


def _decoded(path: Path, data: bytes) -> str:
    """The text of the file, without a byte-order mark."""
    # UTF-16 without its mark has a zero byte in every ASCII letter, and UTF-8 text has none.
    if data.startswith(UTF_16) or b"\0" in data[:1000]:
        raise ValueError(
            f"{path} is in UTF-16, or no text at all: "
            f"convert it with `iconv -f UTF-16 -t UTF-8 {path} > {_converted(path)}`"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ValueError(
            f"{path}, line {line}: byte {data[error.start]:#04x} is not UTF-8. If the file comes "
            f"from Windows, convert it with "
            f"`iconv -f WINDOWS-1252 -t UTF-8 {path} > {_converted(path)}`"
        ) from error


def _converted(path: Path) -> Path:
    """A name for the converted file, beside the one that it comes from."""
    return path.with_name(f"utf8-{path.name}")


# --- JSON -----------------------------------------------------------------------------------------


def _json_rows(path: Path, text: str) -> Iterable[PlacedRow]:
    """JSON Lines, or one list of rows."""
    # `splitlines` would also cut at characters that JSON allows inside a text.
    lines = text.split("\n")
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        return []
    # A file whose first line stands alone has one row in each line.
    first_number, first_line = numbered[0]
    if _is_json(first_line):
        whole = None
        if len(numbered) == 1:
            whole = _parsed(first_line)
        if isinstance(whole, list):
            return _numbered(path, whole)
        _refuse_rows_inside(path, whole)
        return _lines(path, numbered)

    try:
        whole = _parsed(text)
    except ValueError as error:
        raise ValueError(_no_json(path, first_number, text, error)) from error
    if isinstance(whole, list):
        return _numbered(path, whole)
    _refuse_rows_inside(path, whole)
    return [(f"{path}, line {first_number}", whole)]  # one row, over several lines


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("lists or objects inside of each other, hundreds deep") from error


def _is_json(line: str) -> bool:
    try:
        _parsed(line)
    except ValueError:
        return False
    return True


def _lines(path: Path, numbered: Iterable[tuple[int, str]]) -> Iterator[PlacedRow]:
    for number, line in numbered:
        place = f"{path}, line {number}"
        try:
            row = _parsed(line)
        except ValueError as error:
            raise ValueError(f"{place} is no JSON ({error}): mend it, or take it out") from error
        yield place, row


def _no_json(path: Path, first_number: int, text: str, error: ValueError) -> str:
    """What is wrong with a text that is JSON neither in its first line nor as a whole."""
    if text.lstrip().startswith(("[", "{")):
        return (
            f"{path} is no JSON ({error}): mend it there; "
            f"each row stands in one line of its own, or all rows in one list"
        )
    return (
        f"{path}, line {first_number} is no JSON: give JSON Lines or a list of rows, "
        f"and name a table of texts .csv or .tsv"
    )


def _refuse_rows_inside(path: Path, whole: Any) -> None:
    """Raise ValueError for one object that holds the rows under a name, as {"data": […]} does."""
    if not isinstance(whole, dict):
        return
    for name, value in whole.items():
        # The turns of a conversation are objects as well, and they are what is to be read.
        if name in ("messages", "conversations", "prompt", "completion"):
            continue
        if isinstance(value, list) and value and isinstance(value[0], dict):
            program = f'import json; print(json.dumps(json.load(open("{path}"))["{name}"]))'
            raise ValueError(
                f"{path} is one object whose rows are under {name!r}: "
                f"write them out with `python -c '{program}' > rows.json`"
            )


# --- tables ---------------------------------------------------------------------------------------


def _csv_rows(path: Path, text: str) -> Iterator[PlacedRow]:
    """The records of a CSV file; every value is a text, as it stands there."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(text), strict=True)
    # The limit of Python, 128 KiB in one field, is for files that nobody trusts.
    limit = csv.field_size_limit(len(text) + 1)
    try:
        records = _records(path, reader)
    finally:
        csv.field_size_limit(limit)
    if not records:
        return
    first_line, names = records[0]
    repeated = [name for name in names if name and names.count(name) > 1]
    if repeated:
        raise ValueError(
            f"{path}, line {first_line} names {repeated[0]!r} twice, and a row has room for one: "
            f"rename a column, or take it out"
        )
    for line, values in records[1:]:
        if len(values) != len(names):
            raise ValueError(
                f"{path}, line {line} has {len(values)} fields, and the first line names "
                f"{len(names)}: put a text with commas or line breaks between double quotes"
            )
        yield f"{path}, line {line}", dict(zip(names, values, strict=True))


def _records(path: Path, reader: Any) -> list[tuple[int, list[str]]]:
    """Each record with the line in which it begins: a text may go over several lines."""
    records = []
    line = 1
    try:
        for values in reader:
            if values:  # not an empty line
                records.append((line, values))
            line = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(
            f"{path}, line {line} is no CSV ({error}): "
            f'write a double quote inside of a text twice, ""'
        ) from error
    return records


def _delimiter(text: str) -> str:
    """What stands between the names of the first line: a comma, a tabulator or a semicolon."""
    first_line = text.split("\n", 1)[0]
    return max(",\t;", key=first_line.count)


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path} is damaged Parquet ({error}): fetch it again") from error


def _arrow_rows(path: Path, head: bytes) -> Iterator[dict[str, Any]]:
    import pyarrow

    open_rows = pyarrow.ipc.open_stream
    if head.startswith(ARROW_FILE):
        open_rows = pyarrow.ipc.open_file
    try:
        with pyarrow.OSFile(os.fspath(path)) as file, open_rows(file) as reader:
            yield from reader.read_all().to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path} is damaged Arrow ({error}): fetch it again") from error


# --- folders --------------------------------------------------------------------------------------


def _of_folder(path: Path, split: str) -> Iterable[PlacedRow]:
    """A data set that `save_to_disk` wrote, or else a folder of data files."""
    from datasets import load_dataset, load_from_disk

    saved = (path / "state.json").exists() or (path / "dataset_dict.json").exists()
    if not saved:
        _refuse_several_formats(path)
    try:
        if saved:
            found = load_from_disk(path)
        else:
            found = load_dataset(os.fspath(path))
    except Exception as error:  # of many types: a missing file, an unknown format
        raise ValueError(
            f"cannot read a data set from the folder {path} ({_first_line(error)}): "
            f"name one of its files, or give a folder that `save_to_disk` wrote"
        ) from error
    if isinstance(found, dict):
        if split not in found:
            raise ValueError(
                f"{path} has no split {split!r}, but {', '.join(found)}: name the folder of one"
            )
        found = found[split]
    return _numbered(path, found)


def _names_its_files(card: Path) -> bool:
    """Whether the head of a README, between two lines of dashes, says which files to read."""
    if not card.is_file():
        return False
    before, _, rest = card.read_text(errors="replace").partition("---\n")
    head = rest.partition("\n---")[0]
    return before == "" and "data_files:" in head


def _refuse_several_formats(path: Path) -> None:
    """Raise ValueError for files of which `load_dataset` would read those of one format alone.

    Where a README names the files of the data set, `load_dataset` reads those.
    """
    if _names_its_files(path / "README.md"):
        return
    found = {}
    for file in sorted(path.rglob("*")):
        hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        describes_data = file.name.startswith("dataset_info")
        if file.suffix in FORMATS and not hidden and not describes_data:
            found.setdefault(FORMATS[file.suffix], file)
    if len(found) > 1:
        examples = ", ".join(f"{file.name} ({kind})" for kind, file in found.items())
        raise ValueError(
            f"the folder {path} has files of several formats, {examples}, and only those of one "
            f"would be read: put them into a folder of their own, or name one file"
        )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
