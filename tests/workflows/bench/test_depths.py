"""Small models of equal weights side by side."""

import pytest

from recipes_lib.workflows.bench.depths import compare_depths

TINY = dict(weights=100_000, steps=3, rows=2, seq_len=16)


def test_depths_have_equal_weights_and_read_the_same_text():
    """Catches a depth that is larger than the others, and one that trains on other bytes."""
    found = compare_depths(layers=(1, 3, 1), seeds=(0, 1), **TINY)
    assert list(found) == [1, 3]
    shallow, deep = found.values()
    assert deep.parameters == pytest.approx(shallow.parameters, rel=0.03)
    assert deep.hidden < shallow.hidden
    assert shallow.beyond_first == [0.0, 0.0]
    assert deep.losses != shallow.losses
    assert all(loss < 6 for loss in deep.losses)  # log 256 = 5.5 before any step
    again = compare_depths(layers=(1,), seeds=(0,), **TINY)
    assert again[1].losses[0] == pytest.approx(shallow.losses[0], rel=1e-6)
    assert "3 blocks" in str(deep)


def test_bad_input():
    with pytest.raises(ValueError, match="depths=0"):
        compare_depths(layers=(), seeds=(0,), **TINY)
    with pytest.raises(ValueError, match="no such model"):
        compare_depths(layers=(200,), seeds=(0,), **TINY)
