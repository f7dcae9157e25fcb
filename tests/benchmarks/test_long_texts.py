"""Notebook 04's recipes at length."""

import pytest

from benchmarks.long_texts import ON_THE_CLOCK, Settings, measured

TINY = Settings(
    shape="tiny-smollm2", tokens=64, layers=2, rounds=1, learns=64, learning_layers=2, steps=3
)


def test_each_way_is_timed_and_learns_the_same():
    """The mistakes: a way that is left out, and one whose losses are those of another step."""
    *_, found = measured(TINY)
    assert [row["name"] for row in found["rows"]] == list(ON_THE_CLOCK)
    plain = found["losses"]["plain"]
    assert plain[2] < plain[0], "the first text, after a step"
    assert found["losses"]["five lines"] == pytest.approx(plain, abs=0.01)
