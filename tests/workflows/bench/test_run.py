import gc

import pytest
import torch

from recipes_lib.training import compiled_blocks
from recipes_lib.workflows.bench import run
from recipes_lib.workflows.bench.entries import ENTRIES
from recipes_lib.workflows.bench.run import LR, Bench, techniques


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setenv("RECIPES_RUNS", str(tmp_path))
    return Bench("tiny-llama", 4, 32, micro_batches=2)


def test_a_ladder_of_two_rows(bench, tmp_path):
    announced = []
    ladder = bench.run("gradient_accumulation", repeats=1, announce=announced.append)
    assert [row.name for row in ladder.rows] == announced == ["baseline", "gradient_accumulation"]
    baseline, row = ladder.rows
    assert row.predicted_bytes < baseline.predicted_bytes
    assert row.peak_bytes < baseline.peak_bytes
    assert row.loss == pytest.approx(baseline.loss, rel=1e-5)
    assert ladder.path == tmp_path / "bench_gradient_accumulation.json"


def test_a_row_does_not_pay_for_the_model_of_the_one_before(bench):
    """A model that hangs in a reference cycle, or in a name that is still there."""
    gc.collect()
    before = parameters_alive()
    alive = []
    bench.run("lora", repeats=1, announce=lambda name: alive.append(parameters_alive()))
    assert alive == [before, before]


def parameters_alive():
    return sum(issubclass(type(thing), torch.nn.Parameter) for thing in gc.get_objects())


def test_the_timelines_of_both_rows_in_one_picture(bench, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "memory.png"
    bench.run("activation_checkpointing", repeats=1, timeline=picture)
    assert picture.stat().st_size > 10_000


def test_compiled_blocks_have_a_timeline_too(bench, tmp_path, monkeypatch):
    """Their memory is measured without one: the picture would show the baseline alone."""
    drawn = []
    monkeypatch.setattr(run, "_draw", lambda timelines, ladder, path: drawn.append(timelines))
    monkeypatch.setattr(compiled_blocks, "BACKEND", "eager")
    compiled_blocks._compile_once.cache_clear()
    ladder = bench.run("compiled_blocks", repeats=1, timeline=tmp_path / "memory.png")
    compiled_blocks._compile_once.cache_clear()
    (timelines,) = drawn
    assert list(timelines) == ["baseline", "compiled_blocks"]
    # In its timeline the blocks are plain ones.
    assert timelines["compiled_blocks"].peak == pytest.approx(ladder.rows[0].peak_bytes, rel=0.01)


def test_every_row_trains_the_same_weights_on_the_same_tokens(bench):
    first, second = bench.fresh(), bench.fresh()
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)
    batch, again = bench.batch(first), bench.batch(second)
    assert torch.equal(batch["input_ids"], again["input_ids"])
    carrying_loss = (batch["labels"] != -100).sum()
    assert carrying_loss == bench.targets == 4 * 16


def test_the_plain_step_with_an_optimizer_of_ones_own(bench):
    model = bench.fresh()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = bench.plain(model, optimizer)
    assert step() > step()
    assert bench.plain(model)() < 10  # with AdamW


def test_names_are_those_of_the_entries():
    assert techniques() == sorted(ENTRIES)
    assert LR == 2e-5


def test_bad_input(bench):
    with pytest.raises(ValueError, match="must divide"):
        Bench("tiny-llama", 4, 32, micro_batches=3)
    with pytest.raises(ValueError, match="at least 1 row"):
        Bench("tiny-llama", 0, 32, micro_batches=1)
    with pytest.raises(ValueError, match="only a shape"):
        Bench("smollm2", 4, 32, micro_batches=4, layers=2)
    with pytest.raises(ValueError, match="technique='magic': choose one of"):
        bench.run("magic")
    with pytest.raises(ValueError, match="technique='baseline': choose one of"):
        bench.run("baseline")  # beside itself
    with pytest.raises(ValueError, match="technique='magic': choose one of"):
        bench.arrange("magic", None)
