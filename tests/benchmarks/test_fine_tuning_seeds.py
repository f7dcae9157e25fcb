"""Notebook 05's task with other seeds, and its second task."""

import re
from dataclasses import replace
from functools import partial

import pytest

from benchmarks import fine_tuning_seeds, study
from benchmarks.fine_tuning_seeds import REMINDERS, Settings, compare, trained
from benchmarks.function_names import BLANK, compare_names, name_pairs
from benchmarks.own_answers import OWN_ANSWERS

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


def test_each_step_has_an_answer_of_the_models_own(monkeypatch):
    """The mistake: they are mixed in once, and not in each step of each pass."""
    row = {"input_ids": [5, 6, 7], "labels": [5, 6, 7]}
    steps = []
    monkeypatch.setattr(fine_tuning_seeds, "own_answers", lambda name, count: [row])
    monkeypatch.setattr(fine_tuning_seeds, "examined", lambda *_: {})
    monkeypatch.setattr(study, "train_step", lambda model, optimizer, batch: steps.append(batch))
    monkeypatch.setattr(study, "batch_of", lambda rows: rows)
    trained("LoRA, with own answers", replace(TINY, rows=3), OWN_ANSWERS, seed=1)
    assert [len(step) for step in steps] == [4, 4, 3] * 2
    assert all(step[-1] == row for step in steps)


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


def test_a_question_does_not_hold_its_answer():
    """The mistakes: a call or the docstring has the name, and a held-out function trains."""
    train, held_out = (name_pairs(split=split, limit=200) for split in ("train", "validation"))
    for pair in train + held_out:
        assert BLANK in pair["prompt"]
        assert not re.search(rf"\b{pair['completion']}\b", pair["prompt"])
    assert not {pair["prompt"] for pair in train} & {pair["prompt"] for pair in held_out}


def test_names_are_compared_in_all_ways_and_with_a_rule(monkeypatch, tmp_path):
    """The mistakes: a way is left out, and a rule that any answer passes or none."""
    monkeypatch.setenv("RECIPES_RUNS", str(tmp_path))
    monkeypatch.setattr(fine_tuning_seeds, "examined", lambda *_: {})
    monkeypatch.setattr(fine_tuning_seeds, "trained", lambda way, *_, seed: {"way": way})
    settings = replace(TINY, seeds=(1,), held_out=200)
    *_, found = compare_names(settings)
    assert [run["way"] for run in found["runs"]] == ["full fine-tuning", "LoRA", "LoRA, small rate"]
    assert 0 < found["rule"] < 40
