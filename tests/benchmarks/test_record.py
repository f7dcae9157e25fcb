"""A recorded run is kept whole, and found again by its machine and its date."""

from __future__ import annotations

import json

import pytest

from benchmarks import record
from recipes_lib.core.measure.provenance import provenance


def machine_facts(**changed):
    facts = provenance() | {"fast": False, "device": "cpu", "date": "2026-01-02"}
    return facts | {"name": "Test CPU @ 2.50GHz"} | changed


def written(folder, name, content, **facts):
    """The file of a program in `runs/`."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps(machine_facts(**facts) | content))
    return path


def test_every_number_of_a_nested_run_becomes_a_record():
    """The mistake: a number that is lost on the way, or loses the row that it belongs to."""
    content = {
        "facts": {"useful": {"packed": 3.0}, "exact": True},
        "rows": [{"name": "LoRA", "peak_bytes": 5}],
        "runs": [{"way": "teacher", "seed": 1, "loss": 2.5}],
        "times": {"file": [{"token": 0.1}, {"token": 0.2}]},
        "verdict": {"difference": -1.0, "low": -1.2, "high": -0.8},
    }
    found = {(r["row"], r["metric"]): r for r in record.records_of("05", content)}
    assert found["", "useful · packed"]["value"] == 3.0
    assert found["LoRA", "peak_bytes"] == {
        "notebook": "05",
        "row": "LoRA",
        "metric": "peak_bytes",
        "value": 5,
        "unit": "B",
    }
    assert found["teacher, 1", "loss"]["value"] == 2.5
    assert found["", "times · file · token"]["value"] == [0.1, 0.2]
    assert found["", "verdict"]["low"] == -1.2


def test_a_time_whose_turns_differ_is_withdrawn():
    """The mistake: "2.72× (1.25–13.82)" is quoted as the price of a recipe."""
    row = {"row": "offload", "metric": "ratio", "value": 2.7, "low": 1.2, "high": 13.8, "unit": "×"}
    (ratio,) = record.records_of("01", {"rows": [row]})
    assert "disturbed" in ratio["withdrawn"]


def test_a_notebook_is_added_or_replaced_in_the_file_of_its_machine_and_day(tmp_path):
    """The mistake: the second part of a day replaces the first, or stays beside its older self."""
    path = record.keep("ladder", {"a": 1, "b": 2}, facts=machine_facts(), folder=tmp_path)
    assert path.name.startswith("test-") and path.name.endswith("2026-01-02.jsonl")
    record.keep("limits", {"bf16_tflops": 1.0}, facts=machine_facts(), folder=tmp_path)
    record.keep("ladder", {"a": 3}, facts=machine_facts(), folder=tmp_path)
    assert [(r["metric"], r["value"]) for r in record.read(path)] == [
        ("bf16_tflops", 1.0),
        ("a", 3),
    ]
    assert all("CPU cores" in r["machine"] and r["date"] for r in record.read(path))
    assert list(tmp_path.iterdir()) == [path]


def test_the_newest_run_of_a_kind_of_machine(tmp_path):
    """The mistake: numbers of a GPU as those of a CPU, or those of an older day."""
    gpu = {"device": "cuda", "name": "Test GPU"}
    for facts in (machine_facts(), machine_facts(date="2026-01-01"), machine_facts(**gpu)):
        rows = [{"name": "QLoRA", "peak_bytes": 10}]
        record.keep("01", {"rows": rows, "day": facts["date"]}, facts=facts, folder=tmp_path)
    found = record.newest("01", folder=tmp_path)
    assert found.facts["day"] == "2026-01-02"
    assert found.rows["QLoRA"]["peak_bytes"] == 10
    assert record.newest("01", gpu=True, folder=tmp_path).machine == "Test GPU"
    assert record.newest("01", row="magic", folder=tmp_path) is None


@pytest.mark.parametrize(
    ("content", "facts", "why"),
    [({}, {"fast": True}, "RECIPES_FAST"), ({"complete": False}, {}, "was cut")],
)
def test_small_sizes_and_runs_that_were_cut_are_not_recorded(tmp_path, content, facts, why):
    path = written(tmp_path, "distillation", content, **facts)
    with pytest.raises(ValueError, match=why):
        record.keep_run(path)


def test_a_cut_run_keeps_what_it_measured(tmp_path):
    """The mistakes: all is lost; a time without turns is compared; a page does not say it."""
    measured = {"turned": (2, 0.5), "waiting": (0, 0.9)}
    rows = []
    for name, (turns, ratio) in measured.items():
        for metric, value in (("turns", turns), ("ratio", ratio), ("peak_bytes", 10)):
            rows.append({"row": name, "metric": metric, "value": value, "unit": ""})
    path = written(tmp_path, "01_large", {"rows": rows})
    record.keep_run(path, folder=tmp_path, cut="time was up")
    found = record.newest("01", folder=tmp_path)
    assert found.rows["turned"]["ratio"] == 0.5
    assert "ratio" not in found.rows["waiting"]
    assert found.rows["waiting"]["peak_bytes"] == 10
    assert found.facts["cut"] == "time was up"
