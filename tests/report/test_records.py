"""What a notebook shows of a recorded run."""

import json

from recipes_lib.report import records


def file_of(folder, day, *lines):
    shared = {"machine": "Test CPU, 2 CPU cores, native bf16", "date": day}
    whole = [shared, *({"row": "", "unit": ""} | line for line in lines)]
    (folder / f"test-{day}.jsonl").write_text("\n".join(map(json.dumps, whole)))


def test_the_newest_run_is_shown_nested_as_it_was_written(tmp_path, monkeypatch):
    """The mistake: the run of another day, or a curve that lost its name."""
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    old = {"notebook": "rope", "metric": "losses · yarn", "value": [9.0]}
    file_of(tmp_path, "2026-01-01", old)
    ranged = {"notebook": "rope", "metric": "gain", "value": 2.0, "low": 1.5, "high": 2.5}
    file_of(tmp_path, "2026-02-01", old | {"value": [1.0, 2.0]}, ranged)
    assert records.recorded("rope") == {
        "losses": {"yarn": [1.0, 2.0]},
        "gain": {"value": 2.0, "low": 1.5, "high": 2.5},
        "measured_on": "recorded on Test CPU, 2026-02-01",
    }
    assert records.recorded("magic") is None
