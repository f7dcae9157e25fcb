"""The file of a program: whole, of one day, and complete only when all was measured."""

import json
from dataclasses import dataclass

import pytest

from benchmarks import study
from tests.benchmarks.test_record import machine_facts


@dataclass(frozen=True)
class Settings:
    steps: int = 9
    rates: tuple[float, ...] = (0.5,)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a program with parts, and give what it wrote."""
    monkeypatch.setenv("RECIPES_RUNS", str(tmp_path))

    def run(*arguments):
        def measured(settings, options):
            for part in options.parts:
                yield {part: settings.steps}

        options = {"parts": ("a", "b"), "short": Settings(steps=1), "about": "A program."}
        path = study.run("test", Settings(), measured, arguments=list(arguments), **options)
        return json.loads(path.read_text())

    return run


def test_options_are_the_fields_of_the_settings(run):
    written = run("--steps", "5", "--rates", "0.1", "0.2")
    assert (written["a"], written["settings"]["rates"]) == (5, [0.1, 0.2])
    assert run("--short")["a"] == 1


def test_only_a_whole_run_in_full_size_is_complete(run):
    """The mistake: two of three seeds are read as the whole comparison."""
    assert run()["complete"]
    assert not run("--short")["complete"]


def test_parts_of_another_day_do_not_get_the_date_of_today(run, tmp_path):
    """The mistake: one part runs again, and the others seem to be measured with it."""
    run()
    assert run("--parts", "a", "--steps", "3")["b"] == 9
    path = tmp_path / "test.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"date": "2026-01-01"}))
    with pytest.raises(ValueError, match="with date 2026-01-01"):
        run("--parts", "a")


def test_what_was_measured_is_shown_as_the_texts_will_show_it():
    """The mistake: an hour of seeds, and no word of what they say."""
    facts = machine_facts() | {"steps": 3, "seeds": [0], "sizes": {"rows": 2, "seq_len": 16}}
    row = {"layers": 2, "hidden": 8, "parameters": 9, "seconds_per_token": 0.1}
    rows = [row | {"losses": [2.5], "beyond_first": [0.0]}]
    (table,) = study.tables("depths", facts | {"rows": rows})
    assert "| 2 × 8 | 9 | 2.500 |" in table
    assert list(filter(None, study.tables("muon", facts))) == [], "there is no run yet"
