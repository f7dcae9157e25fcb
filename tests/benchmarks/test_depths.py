"""Small models of equal weights side by side."""

import pytest

from benchmarks.depths import Settings, compare

TINY = dict(weights=100_000, steps=3, rows=2, seq_len=16)


def test_depths_have_equal_weights_and_read_the_same_text():
    """The mistakes: a depth that is larger than the others, and one that reads other bytes."""
    (found,) = compare(Settings(layers=(1, 3), seeds=2, **TINY))
    shallow, deep = found["rows"]
    assert deep["parameters"] == pytest.approx(shallow["parameters"], rel=0.03)
    assert deep["hidden"] < shallow["hidden"]
    assert shallow["beyond_first"] == [0.0, 0.0]
    assert deep["losses"] != shallow["losses"]
    (again,) = compare(Settings(layers=(1,), seeds=1, **TINY))
    assert again["rows"][0]["losses"][0] == pytest.approx(shallow["losses"][0], rel=1e-6)
