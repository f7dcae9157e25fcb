"""A recorded run is kept whole, and found again by its machine, its date and its rows."""

from __future__ import annotations

import json

import pytest

from benchmarks import record
from recipes_lib.core.measure.machine import provenance


def machine_facts(**changed):
    facts = provenance() | {"fast": False, "device": "cpu", "date": "2026-01-02"}
    return facts | {"name": "Test CPU @ 2.50GHz"} | changed


def test_parts_are_added_to_the_file_of_the_machine_and_day(tmp_path):
    """The mistake: the second part of a day replaces the first, or a half-written file stays."""
    content = {"rows": [], "facts": {}}
    path = record.keep("ladder", content, facts=machine_facts(), folder=tmp_path)
    assert path.name.startswith("test-")
    assert path.name.endswith("2026-01-02.json")
    record.keep("limits", {"bf16_tflops": 1.0}, facts=machine_facts(), folder=tmp_path)
    assert set(json.loads(path.read_text())["parts"]) == {"ladder", "limits"}
    assert list(tmp_path.iterdir()) == [path]


def test_small_sizes_are_not_recorded(tmp_path):
    path = tmp_path / "ladder.json"
    path.write_text(json.dumps(provenance() | {"fast": True, "name": "x", "facts": {}, "rows": []}))
    with pytest.raises(ValueError, match="run it in full size first"):
        record.keep_ladder(path)


def test_a_row_is_found_under_its_older_name(tmp_path):
    """The mistake: a text that asks for "QLoRA" shows nothing until notebook 01 has run again."""
    content = {"rows": [{"name": "+ QLoRA"}], "facts": {}}
    record.keep("ladder", content, facts=machine_facts(), folder=tmp_path)
    assert record.newest("ladder", "cpu", row="QLoRA", folder=tmp_path) is not None
    assert record.newest("ladder", "cpu", row="LoRA", folder=tmp_path) is None
