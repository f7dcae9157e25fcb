"""Keep what a run measured, and find it again: benchmarks/results/<machine>-<date>.jsonl.

python -m benchmarks.record runs/01_large_models_limited_hardware.json runs/distillation.json

A line is a record, and says all that is known of one number:

    notebook, row, metric       where it belongs: "01", "QLoRA", "peak_bytes"
    value, low, high, unit      the number, and the range of its turns or seeds if there is one
    machine, versions, date     where and when it was measured, with the commit
    withdrawn                   why nobody should quote it, if that is so

`notebook` is also the name of a program of its own ("distillation") or of a part of
`benchmarks.gpu`. A fact that belongs to no row has the row "". A value may be a text, or a list:
one number for each turn, seed or step.

One file holds a machine and a day: its first line has what all its records share, and `read` gives
each record whole. Recording a notebook a second time on that day replaces it.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recipes_lib.core.measure.provenance import provenance
from recipes_lib.report.records import BETWEEN, RESULTS

# Names of fields that hold nothing but their content.
CONTAINERS = ("rows", "runs", "facts", "pairs")
# What tells the rows of a list apart.
NAMES = ("name", "way", "optimizer", "where", "dtype", "kv_heads", "layers", "hidden")
NAMES += ("pixels", "lr", "seed")
# Of a run's file, what says where it was measured.
MACHINE = ("device", "name", "memory_bytes", "native_bf16", "cores", "tier", "versions")
MACHINE += ("fast", "date", "commit", "ladder", "complete")

WIDEST = 1.5  # the slowest turn over the fastest: beyond it the machine was disturbed
DISTURBED = "its turns differ by more than 1.5 times: another program disturbed the machine"

Record = dict[str, Any]

# --- from nested to flat ------------------------------------------------------------------------


def records_of(notebook: str, content: dict[str, Any]) -> list[Record]:
    """What a run holds as flat records, without machine and date.

    A run whose rows are records already keeps them.
    """
    rows = content.get("rows")
    found = []
    if isinstance(rows, list) and rows and "metric" in rows[0]:
        found = [_withdrawn_if_disturbed(dict(row) | {"notebook": notebook}) for row in rows]
        content = {key: value for key, value in content.items() if key != "rows"}
    for row, path, value, low, high in _leaves("", (), content):
        metric = BETWEEN.join(path)
        record = {"notebook": notebook, "row": row, "metric": metric, "value": value}
        if low is not None:
            record |= {"low": low, "high": high}
        found.append(_withdrawn_if_disturbed(record | {"unit": unit_of(path[-1])}))
    return found


def _leaves(row: str, path: tuple[str, ...], value: Any) -> Iterator[tuple]:
    """(row, path, value, low, high) of everything below a value."""
    if isinstance(value, dict):
        yield from _leaves_of_dict(row, path, value)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield from _leaves_of_rows(row, path, value)
    elif path and value is not None:
        yield row, path, value, None, None


def _leaves_of_dict(row: str, path: tuple[str, ...], value: dict[str, Any]) -> Iterator[tuple]:
    for middle in ("median", "difference"):
        if {middle, "low", "high"} <= value.keys():  # a number with its range
            yield row, path, value[middle], value["low"], value["high"]
            value = {k: v for k, v in value.items() if k not in (middle, "low", "high")}
    for key, part in value.items():
        yield from _leaves_of_part(row, path, str(key), part)


def _leaves_of_part(row: str, path: tuple[str, ...], key: str, part: Any) -> Iterator[tuple]:
    """Of one entry of a dict. Containers leave no trace in the names."""
    if key == "rows" and isinstance(part, dict):
        for name, content in part.items():
            yield from _leaves(name, path, content)
    elif key in CONTAINERS and _holds_dicts(part):
        yield from _leaves(row, path, part)
    else:
        yield from _leaves(row, (*path, key), part)


def _holds_dicts(part: Any) -> bool:
    if isinstance(part, list) and part:
        part = part[0]
    return isinstance(part, dict)


def _leaves_of_rows(row: str, path: tuple[str, ...], rows: list[dict[str, Any]]) -> Iterator[tuple]:
    """Each dict of a list is a row of its own; where none has a name, they are turns."""
    names = [key for key in NAMES if key in rows[0]]
    if "name" in names:
        names = ["name"]
    if not names:
        for key in rows[0]:
            yield row, (*path, key), [turn[key] for turn in rows], None, None
        return
    for content in rows:
        name = ", ".join(str(content[key]) for key in names)
        rest = {key: part for key, part in content.items() if key != "name"}
        yield from _leaves(name, path, rest)


def unit_of(metric: str) -> str:
    """The unit that the name of a metric tells; "" for a plain number."""
    units = {"bytes": "B", "seconds": "s", "ms": "ms", "milliseconds": "ms", "ratio": "×"}
    for word in reversed(metric.split("_")):
        if word in units:
            return units[word]
    return ""


def _withdrawn_if_disturbed(record: Record) -> Record:
    """A ratio of times whose turns differ too much is measured again, and not quoted."""
    low, high = record.get("low"), record.get("high")
    is_ratio = record.get("unit") == "×" or record["metric"].endswith("ratio")
    if is_ratio and low and high / low > WIDEST:
        return record | {"withdrawn": DISTURBED}
    return record


# --- write --------------------------------------------------------------------------------------


def machine_of(facts: dict[str, Any]) -> str:
    """The machine in words: "AMD EPYC, 2 CPU cores, native bf16", or the name of the GPU."""
    name = re.sub(r"\((R|TM)\)", "", facts["name"])
    if facts["device"] != "cpu":
        return name
    bf16 = "native bf16"
    if not facts["native_bf16"]:
        bf16 = "no native bf16"
    return f"{name}, {facts['cores']} CPU cores, {bf16}"


def results_file(facts: dict[str, Any]) -> str:
    """The name of the file for this machine and day: amd-epyc-2cores-bf16-2026-11-25.jsonl."""
    plain = re.sub(r"\((R|TM)\)|@.*|NVIDIA|Processor|CPU", " ", facts["name"])
    slug = re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-")
    kind = ""
    if facts["device"] == "cpu" and facts["native_bf16"]:
        # Two kinds of CPU may share a name: one that multiplies bf16 natively is another machine.
        kind = "-bf16"
    return f"{slug}-{facts['cores']}cores{kind}-{facts['date']}.jsonl"


def keep(
    notebook: str,
    content: dict[str, Any],
    *,
    facts: dict[str, Any] | None = None,
    folder: Path | None = None,
) -> Path:
    """Add a notebook, program or part to the file of this machine and day, and return the file.

    Args:
        facts: of the machine that measured; by default those of this one.
        folder: by default benchmarks/results.
    """
    facts = facts or provenance()
    content = {key: value for key, value in content.items() if key not in MACHINE}
    path = (folder or RESULTS) / results_file(facts)
    path.parent.mkdir(parents=True, exist_ok=True)
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    where = {"machine": machine_of(facts), "versions": versions, "date": facts["date"]}
    where |= {"commit": facts["commit"], "memory_bytes": facts["memory_bytes"]}
    records = []
    if path.exists():
        records = [record for record in read(path) if record["notebook"] != notebook]
        where["memory_bytes"] = read(path)[0]["memory_bytes"]
    records += [where | record for record in records_of(notebook, content)]
    shared = {key: records[0][key] for key in where}
    lines = [shared]
    for record in records:
        lines.append({key: v for key, v in record.items() if shared.get(key) != v})
    write_whole(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return path


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all: who is cut while writing leaves the older file."""
    scratch = path.with_suffix(".part")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)


def keep_run(path: Path, *, folder: Path | None = None, cut: str = "") -> Path:
    """Keep a file from runs/: what a notebook or a program of this folder wrote.

    Args:
        cut: why the run has not ended, if it has not. What it measured is kept, with this reason;
            rows that have taken no turns have no ratio of times then.
    Raises ValueError for small sizes unless a `folder` is given, and for a run that has not ended.
    """
    run = json.loads(path.read_text(encoding="utf-8"))
    if cut:
        run["cut"] = cut
        run["rows"] = _without_first_impressions(run["rows"])
    if run["fast"] and folder is None:
        raise ValueError(f"{path} was measured with RECIPES_FAST=1: run it in full size first")
    if not run.get("complete", True):
        raise ValueError(f"{path} was cut, or is short: record it when the whole run has ended")
    number, _, _ = path.stem.partition("_")
    notebook = path.stem
    if number.isdigit():
        notebook = number  # 01_large_models_limited_hardware
    return keep(notebook, run, facts=run, folder=folder)


def _without_first_impressions(rows: list[Record]) -> list[Record]:
    """The records of a ladder less the ratios of those rows that have not had their turns."""
    waiting = {row["row"] for row in rows if (row["metric"], row["value"]) == ("turns", 0)}
    return [row for row in rows if row["metric"] != "ratio" or row["row"] not in waiting]


# --- read ---------------------------------------------------------------------------------------


class Number(float):
    """A recorded number, which knows its range and why it was withdrawn."""

    low: float | None = None
    high: float | None = None
    withdrawn: str = ""


class Run:
    """All records of one notebook, machine and day.

    `facts` are those that belong to no row, and `rows[name]` those of a row, both nested as the run
    wrote them: `run.facts["useful"]["packed"]`, `run.rows["QLoRA"]["peak_bytes"]`.
    """

    def __init__(self, records: list[Record]) -> None:
        self.records = records
        self.machine = records[0]["machine"]
        self.date = records[0]["date"]
        self.versions = records[0]["versions"]
        by_row: dict[str, dict[str, Any]] = {"": {}}
        for record in records:
            values = by_row.setdefault(record["row"], {})
            *path, last = record["metric"].split(BETWEEN)
            for part in path:
                values = values.setdefault(part, {})
            if isinstance(values, Number):  # what stands beside it: its rounds, its level
                setattr(values, last, _value(record))
            else:
                values[last] = _value(record)
        self.facts = by_row.pop("")
        self.rows = by_row

    def of(self, name: str, *path: str) -> list[Any]:
        """What each seed of a way has: of the rows "labels, 0", "labels, 1", … for "labels"."""
        found = []
        for row, value in self.rows.items():
            if row.startswith(f"{name}, "):
                for part in path:
                    value = value[part]
                found.append(value)
        return found

    @property
    def first(self) -> dict[str, Any]:
        """The row that the others are compared with."""
        return next(iter(self.rows.values()))

    @property
    def last(self) -> dict[str, Any]:
        return list(self.rows.values())[-1]

    def first_of_group(self, name: str) -> dict[str, Any]:
        """The row with which that of this name is compared: the first of its group."""
        group = self.rows[name].get("group")
        return next(row for row in self.rows.values() if row.get("group") == group)


def _value(record: Record) -> Any:
    value = record["value"]
    if isinstance(value, bool | str | list):
        return value
    number = Number(value)
    number.low = record.get("low")
    number.high = record.get("high")
    number.withdrawn = record.get("withdrawn", "")
    return number


def read(path: Path) -> list[Record]:
    """The records of a file, each with all that it shares with the others."""
    shared, *records = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [shared | record for record in records]


def every_record(folder: Path = RESULTS) -> list[Record]:
    """All records, the oldest files first."""
    files = sorted(folder.glob("*.jsonl"), key=lambda path: (path.stem[-10:], path.name))
    return [record for path in files for record in read(path)]


def newest(
    notebook: str, *, gpu: bool = False, row: str | None = None, folder: Path = RESULTS
) -> Run | None:
    """The latest run of a notebook, program or part on a CPU, or on a GPU; None if there is none.

    Args:
        row: only of runs that have a row of this name.
    """
    runs: dict[tuple[str, str], list[Record]] = {}
    for record in every_record(folder):
        on_gpu = " CPU cores" not in record["machine"]
        if record["notebook"] == notebook and on_gpu == gpu:
            runs.setdefault((record["date"], record["machine"]), []).append(record)
    found = [Run(records) for _, records in sorted(runs.items())]
    if row is not None:
        found = [run for run in found if row in run.rows]
    return found[-1] if found else None


if __name__ == "__main__":
    for given in sys.argv[1:]:
        print(keep_run(Path(given)))
