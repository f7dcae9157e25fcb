"""The file of a program: whole, and complete only when all was measured."""

import json
from dataclasses import dataclass

import pytest

from benchmarks import study
from tests.benchmarks.test_record import machine_facts


@dataclass(frozen=True)
class Settings:
    steps: int = 9
    rates: tuple[float, ...] = (0.5,)


def test_the_file_grows_and_is_complete_when_the_run_has_ended(tmp_path, monkeypatch):
    """The mistakes: an option that the settings do not get; two of three seeds as the whole."""
    monkeypatch.setenv("RECIPES_RUNS", str(tmp_path))

    def measured(settings):
        yield {"steps": settings.steps, "rates": settings.rates}
        assert not json.loads((tmp_path / "test.json").read_text())["complete"]
        if settings.steps == 0:
            raise KeyboardInterrupt

    def run(*arguments):
        study.run("test", Settings(), measured, about="A program.", arguments=arguments)

    run("--steps", "5", "--rates", "0.1", "0.2")
    written = json.loads((tmp_path / "test.json").read_text())
    assert (written["steps"], written["rates"], written["complete"]) == (5, [0.1, 0.2], True)
    with pytest.raises(KeyboardInterrupt):
        run("--steps", "0")
    assert not json.loads((tmp_path / "test.json").read_text())["complete"]


def test_what_was_measured_is_shown_as_the_texts_will_show_it():
    """The mistake: an hour of seeds, and no word of what they say."""
    facts = machine_facts() | {"steps": 3, "seeds": [0], "sizes": {"rows": 2, "seq_len": 16}}
    row = {"layers": 2, "hidden": 8, "parameters": 9, "seconds_per_token": 0.1}
    rows = [row | {"losses": [2.5], "beyond_first": [0.0]}]
    assert "| 2 × 8 | 9 | 2.500 |" in study.table("depths", facts | {"rows": rows})
    assert study.table("muon", facts) == "", "there is no run yet"
