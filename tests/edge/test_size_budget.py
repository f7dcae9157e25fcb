"""Which chain a budget needs, by arithmetic."""

import pytest

from recipes_lib.edge.size_budget import (
    Chain,
    Speed,
    choose_chain,
    plain_first_that_fits,
    predicted_choices,
    predicted_file_bytes,
)

SPEEDS = {"fp32": Speed(0.001, 4e9), "int8": Speed(0.001, 8e9)}
CHAINS = [
    Chain((), weights=700_000, work=8_000_000),
    Chain(("8 bits",), 700_000, 8_000_000, bits=8, scales=7_000, format="int8"),
    Chain(("prune",), weights=350_000, work=4_000_000),
    Chain(("prune", "8 bits"), 350_000, 4_000_000, bits=8, scales=5_000, format="int8"),
]


def chosen(megabytes, milliseconds):
    choice = choose_chain(CHAINS, megabytes=megabytes, milliseconds=milliseconds, speeds=SPEEDS)
    return choice.chain.name


@pytest.mark.parametrize(
    ("megabytes", "milliseconds", "name"),
    [
        (1, 10, "8 bits"),  # pruning would be too large
        (3, 2.5, "8 bits"),  # in the order of the price, though pruning fits as well
        (3, 1.6, "prune + 8 bits"),
    ],
)
def test_the_first_chain_that_fits_both_limits(megabytes, milliseconds, name):
    """Catches a choice by one limit alone, and one of the smallest in place of the cheapest."""
    assert chosen(megabytes, milliseconds) == name
    rows = [
        (each.chain.name, each.file_bytes / 1e6, each.seconds * 1e3)
        for each in predicted_choices(CHAINS, speeds=SPEEDS)
    ]
    assert plain_first_that_fits(rows, megabytes, milliseconds) == name


def test_bytes_of_weights_and_scales():
    """A scale for each weight in place of each group, or the graph counted in bits."""
    of_both = dict(weights=64_000, work=1, bits=4, scales=1_000, format="int8")
    chain = Chain(("4 bits",), **of_both)
    assert predicted_file_bytes(chain) == 36_000
    assert predicted_file_bytes(Chain(("4 bits",), graph=130_000, **of_both)) == 166_000


def test_no_chain_fits():
    """The nearest one is that of the limit that is exceeded most."""
    with pytest.raises(ValueError, match=r"Nearest comes prune \+ 8 bits, with 0.37 MB"):
        chosen(0.1, 10)
