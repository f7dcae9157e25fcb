"""The command that measures on a GPU, in small sizes on a CPU."""

from __future__ import annotations

import gc
import subprocess

import pytest
import torch

from benchmarks import gpu, parts, record, versus
from recipes_lib.workflows.bench.run import Bench

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
        gpu.main(["--parts", "versus", "rope", "limits"])
    assert started == ["versus", "rope", "limits"]
    assert results("limits").facts["copy_gb_per_s"] > 0


def test_every_call_takes_less_than_ten_minutes():
    assert all(sum(call.values()) < 600 for call in gpu.CALLS)
    assert gpu.SECONDS.keys() == gpu.PARTS.keys()


def test_the_ladder_has_a_row_per_technique_and_one_that_fails_costs_only_its_own(
    results, monkeypatch
):
    """The mistakes: a refusal ends the ladder; the offload of a GPU is tried on a CPU."""
    monkeypatch.setattr(parts, "techniques", lambda: ["lora", "magic", "optimizer_offload"])
    parts.ladder()
    found = results("ladder")
    assert found.facts["failed"].keys() == {"magic"}
    assert list(found.rows) == ["baseline", "lora"]
    for row in found.rows.values():
        assert row["predicted_bytes"] > 0 and row["tokens_per_second"] > 0


def test_recipes_train_what_the_libraries_train(results):
    """Same loss after three updates, and not more memory."""
    parts.versus()
    found = results("versus").facts
    assert found.keys() == versus.pairs().keys()
    for technique, pair in found.items():
        assert "failed" not in pair, pair
        assert pair["loss"]["recipe"] == pytest.approx(pair["loss"]["library"], abs=1e-4), technique
        assert pair["peak_ratio"] < 1.05, technique


def test_offloaded_checkpoints_beside_those_of_transformers(monkeypatch):
    """Only a GPU has this pair. Here the library's hooks run with memory that is not pinned.

    The mistake: one of the two sides keeps everything, or moves nothing.
    """
    from transformers import modeling_utils

    packed = []

    class Counted(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory, device_type):
            super().__init__(self.pack, lambda tensor: tensor)
            assert pin_memory

        def pack(self, tensor):
            packed.append(tensor.shape)
            return tensor

    monkeypatch.setattr(modeling_utils, "save_on_cpu", Counted)
    bench = Bench("tiny-llama", 16, 64, micro_batches=16, layers=4)
    found = versus.compare(
        bench,
        versus.offloaded_checkpoints,
        versus.transformers_offloaded_checkpoints,
        rounds=1,
    )
    assert found["loss"]["recipe"] == pytest.approx(found["loss"]["library"], abs=1e-5)
    assert {shape for shape in packed if len(shape) == 3 and shape[0] == 16} == {(16, 64, 64)}
    assert found["peak_ratio"] < 1  # theirs stay here, ours are on the disk


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

    class Watching(parts.PeakMemory):
        def __enter__(self):
            watched.append(self)
            return super().__enter__()

        def __exit__(self, *error):
            watched.remove(self)
            return super().__exit__(*error)

    def timed_step(step, **options):
        assert not (options["repeats"] and watched), "on the clock inside of the limit"
        return measure(step, **options)

    measure = parts.measure
    monkeypatch.setattr(parts, "PeakMemory", Watching)
    monkeypatch.setattr(parts, "measure", timed_step)
    parts.qlora()
    found = results("qlora").facts
    assert 0 < found["weights_gib"] < found["peak_gib"] < found["cap_gib"]
    assert found["tokens_per_second"] > 0
