"""Notebook 05's task with other seeds."""

from benchmarks.fine_tuning_seeds import Settings, trained

TINY = Settings(model="tiny-smollm2", pairs=8, held_out=1)


def test_a_way_takes_its_passes_and_a_seed_its_order():
    """The mistakes: adapters that see the pairs once, and a seed that changes nothing."""
    first = trained("full fine-tuning", TINY, seed=1)
    assert first["steps"] == 2
    assert trained("LoRA", TINY, seed=1)["steps"] == 4
    assert trained("full fine-tuning", TINY, seed=2)["loss"] != first["loss"]
