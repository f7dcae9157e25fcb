"""Notebook 05's task with other seeds."""

from dataclasses import replace
from functools import partial

import pytest

from benchmarks import fine_tuning_seeds, study
from benchmarks.fine_tuning_seeds import REMINDERS, Settings, compare, trained

TINY = Settings(model="tiny-smollm2", pairs=8, held_out=1)


def test_a_way_takes_its_passes_and_a_seed_its_order():
    """The mistakes: adapters that see the pairs once, a seed that changes nothing, and source code
    that no step has."""
    first = trained("full fine-tuning", TINY, seed=1)
    assert first["steps"] == 2
    lora = trained("LoRA", TINY, seed=1)
    assert lora["steps"] == 4
    assert trained("LoRA, with source code", TINY, seed=1)["perplexity"] < lora["perplexity"]
    assert trained("full fine-tuning", TINY, seed=2)["loss"] != first["loss"]


def test_a_run_that_was_cut_goes_on_after_its_last_way(monkeypatch, tmp_path):
    """The mistakes: hours are spent again, or a run of other settings counts as this one."""
    monkeypatch.setenv("RECIPES_RUNS", str(tmp_path))
    task = replace(REMINDERS, ways={"first": (), "second": ()})
    monkeypatch.setattr(fine_tuning_seeds, "examined", lambda *_: {})
    took = []

    def takes_note(way, settings, task, *, seed):
        if way == "second" and not took[1:]:
            took.append("cut")
            raise KeyboardInterrupt
        took.append(way)
        return {"way": way, "seed": seed}

    monkeypatch.setattr(fine_tuning_seeds, "trained", takes_note)
    settings = replace(TINY, seeds=(1,))
    of_task = partial(compare, task=task)
    run = partial(study.run, "fine_tuning_seeds", settings, of_task, about="Seeds.")
    with pytest.raises(KeyboardInterrupt):
        run(arguments=[])
    run(arguments=[])
    assert took == ["first", "cut", "second"]
    run(arguments=["--pairs", "4"])
    assert took[3:] == ["first", "second"]
