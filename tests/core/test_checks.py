import math

import numpy
import pytest

from recipes_lib.core.checks import check_number, check_whole


@pytest.mark.parametrize("value", [0, 2.0])
def test_what_is_no_whole_number_of_one_or_more(value):
    """2.0 comes from a mistake, such as `batch / 2`; NumPy's whole numbers are some."""
    check_whole(rank=numpy.int64(3))
    with pytest.raises(ValueError, match=r"rank=.*: give a whole number of 1 or more"):
        check_whole(rank=value)


def test_bounds_of_whole_numbers():
    check_whole(least=0, most=4, sinks=0)
    check_whole(least=0, most=4, sinks=4)
    with pytest.raises(ValueError, match="sinks=5: give a whole number from 0 to 4"):
        check_whole(least=0, most=4, heads=3, sinks=5)


@pytest.mark.parametrize("value", [-0.1, 1, math.nan])
def test_numbers_outside_their_bounds(value):
    """NaN is neither below nor above a bound: a check by `<` alone would let it pass."""
    check_number(least=0, below=1, dropout=numpy.float32(0))
    check_number(above=0, alpha=1e-9)
    message = "give a finite number of 0 or more and below 1"
    with pytest.raises(ValueError, match=f"dropout=.*: {message}"):
        check_number(least=0, below=1, dropout=value)
