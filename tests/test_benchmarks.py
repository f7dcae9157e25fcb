"""The command that measures on a GPU, in small sizes on a CPU."""

from __future__ import annotations

import gc
import subprocess

import pytest

from benchmarks import gpu, record, versus

# --- the measurements ---------------------------------------------------------------------------


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Small sizes, and a reader for what the parts keep."""
    monkeypatch.setenv("RECIPES_RUNS", str(tmp_path))
    monkeypatch.setenv("RECIPES_FAST", "1")
    monkeypatch.delenv("RECIPES_RESULTS", raising=False)
    # What the test before has imported (peft, a model's code) is walked through no more.
    gc.collect()
    gc.freeze()

    def read(part):
        return record.newest(part, folder=tmp_path / "results")

    return read


def test_the_command_starts_each_part_and_one_that_fails_costs_only_itself(results, monkeypatch):
    """The mistakes: words that the process of a part does not take; an error that ends them all."""
    started = []
    really_run = subprocess.run

    def run(command, *, timeout=None, **options):
        if "benchmarks.gpu" not in command:  # git, which names the commit
            return really_run(command, **options)
        part = command[-1]
        started.append(part)
        if part == "versus":
            raise subprocess.CalledProcessError(1, command)
        if part == "rope":
            raise subprocess.TimeoutExpired(command, timeout)
        gpu.main(command[command.index("benchmarks.gpu") + 1 :])

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SystemExit, match="failed: versus, rope"):
        gpu.main(["--parts", "versus", "rope", "longest"])
    assert started == ["versus", "rope", "longest"]
    assert results("longest").facts["peak_gib"] > 0


def test_every_call_takes_less_than_ten_minutes():
    assert all(sum(call.values()) < 600 for call in gpu.CALLS)
    assert gpu.SECONDS.keys() == gpu.PARTS.keys()


def test_recipes_train_what_the_libraries_train(results):
    """Same loss after three updates, and not more memory."""
    gpu.versus()
    found = results("versus").facts
    assert found.keys() == versus.pairs().keys()
    for technique, pair in found.items():
        assert "failed" not in pair, pair
        assert pair["loss"]["recipe"] == pytest.approx(pair["loss"]["library"], abs=1e-4), technique
        assert pair["peak_ratio"] < 1.05, technique


def test_ways_that_train_something_else_are_not_timed():
    class NoModel:
        def fresh(self):
            return None

    def side(loss):
        return lambda model, bench: versus.Side(lambda: loss)

    bench = NoModel()
    with pytest.raises(ValueError, match="do not train the same"):
        versus.compare(bench, side(1.0), side(1.1), rounds=1)


def test_qlora_stays_under_its_cap(results, monkeypatch):
    """The mistake: the limit looks at each operator, and a step on the clock pays for that."""
    watched = []

    class Watching(gpu.PeakMemory):
        def __enter__(self):
            watched.append(self)
            return super().__enter__()

        def __exit__(self, *error):
            watched.remove(self)
            return super().__exit__(*error)

    def timed_step(step, **options):
        assert not (options["repeats"] and watched), "on the clock inside of the limit"
        return measure(step, **options)

    measure = gpu.measure
    monkeypatch.setattr(gpu, "PeakMemory", Watching)
    monkeypatch.setattr(gpu, "measure", timed_step)
    gpu.qlora()
    found = results("qlora").facts
    assert 0 < found["weights_gib"] < found["peak_gib"] < found["cap_gib"]
    assert found["tokens_per_second"] > 0
