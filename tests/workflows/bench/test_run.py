"""The technique and the plain step, on the same weights and tokens."""

import pytest

from recipes_lib.training import compiled_blocks
from recipes_lib.workflows.bench import run
from recipes_lib.workflows.bench.run import Bench


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setenv("RECIPES_RUNS", str(tmp_path))
    return Bench("tiny-llama", 4, 32, micro_batches=2)


def test_half_of_each_row_carries_loss(bench):
    """The mistake: a loss in chunks looks better than it is, for it leaves out the other rows."""
    labels = bench.batch(bench.fresh())["labels"]
    assert (labels != -100).sum() == 4 * 16


def test_the_picture_has_compiled_blocks_too(bench, tmp_path, monkeypatch):
    """The mistake: they have no timeline, and the picture fails, or shows one row."""
    monkeypatch.setattr(compiled_blocks, "BACKEND", "eager")
    compiled_blocks._compile_once.cache_clear()
    drawn = []
    draw = run.timeline_chart

    def draws(timelines, **options):
        drawn.extend(timelines)
        return draw(timelines, **options)

    monkeypatch.setattr(run, "timeline_chart", draws)
    bench.run("compiled_blocks", rounds=1, timeline=tmp_path / "memory.png")
    compiled_blocks._compile_once.cache_clear()
    assert drawn == ["baseline", "compiled_blocks"]
    assert (tmp_path / "memory.png").exists()


def test_what_cannot_be_measured_is_refused(bench):
    """The mistakes: layers that a loaded model keeps, and rows that no micro-batch takes."""
    with pytest.raises(ValueError, match="must divide"):
        Bench("tiny-llama", 4, 32, micro_batches=3)
    with pytest.raises(ValueError, match="only a shape"):
        Bench("smollm2", 4, 32, micro_batches=4, layers=2)
    with pytest.raises(ValueError, match="technique='baseline': choose one of"):
        bench.run("baseline")  # beside itself
