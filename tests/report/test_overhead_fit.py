"""The two terms of a token's time: found where they are known, and refused where they cannot be."""

import pytest

from recipes_lib.report.overhead_fit import fit_overhead

OVERHEAD = 0.0065
BANDWIDTH = 20e9
SIZES = (135e6, 270e6, 538e6, 1236e6)


def line(size):
    return OVERHEAD + size / BANDWIDTH


def test_both_terms_are_found():
    """The mistake: the slope is called the bandwidth, or the two terms are swapped."""
    fit = fit_overhead([(size, line(size)) for size in SIZES])
    assert fit.overhead == pytest.approx(OVERHEAD)
    assert fit.bandwidth == pytest.approx(BANDWIDTH)
    assert fit.seconds(270e6) == pytest.approx(0.02)
    assert fit.overhead_share(270e6) == pytest.approx(0.325), "6.5 of 20 ms"


def test_a_time_that_does_not_grow_is_refused():
    """The mistake: a negative bandwidth, out of times of a busy machine."""
    with pytest.raises(ValueError, match="does not grow with the bytes"):
        fit_overhead([(1e8, 0.03), (2e8, 0.02), (3e8, 0.01)])
