"""Recorded results are found whatever machine they come from."""

import json

from recipes_lib.report import records


def write(folder, name, date, **parts):
    (folder / f"{name}.json").write_text(json.dumps({"name": "AMD", "date": date, "parts": parts}))


def test_the_newest_run_that_has_the_part(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    write(tmp_path, "b", "2026-01-01", rope={"tokens": 1})
    write(tmp_path, "a", "2026-02-01", rope={"tokens": 2})
    write(tmp_path, "c", "2026-03-01", limits={})
    newest = {"tokens": 2, "measured_on": "recorded on AMD, 2026-02-01"}
    assert records.recorded("rope") == newest
    assert records.recorded("magic") is None


def test_the_folder_is_that_of_the_benchmarks():
    """The mistake: a file that moves by one folder finds nothing, and says only None."""
    assert list(records.RESULTS.glob("*.json"))
