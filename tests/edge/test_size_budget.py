"""Which chain a budget needs, by arithmetic. Notebook 06 compares the choice with plain lines."""

import pytest

from recipes_lib.edge.size_budget import (
    Chain,
    Speed,
    choose_chain,
    predicted_file_bytes,
)

SPEEDS = {"fp32": Speed(0.001, 4e9), "int8": Speed(0.001, 8e9)}
CHAINS = [
    Chain((), weights=700_000, work=8_000_000),
    Chain(("8 bits",), 700_000, 8_000_000, bits=8, scales=7_000, format="int8"),
    Chain(("prune",), weights=350_000, work=4_000_000),
    Chain(("prune", "8 bits"), 350_000, 4_000_000, bits=8, scales=5_000, format="int8"),
]


def test_bytes_of_weights_and_scales():
    """A scale for each weight in place of each group, or the graph counted in bits."""
    of_both = dict(weights=64_000, work=1, bits=4, scales=1_000, format="int8")
    chain = Chain(("4 bits",), **of_both)
    assert predicted_file_bytes(chain) == 36_000
    assert predicted_file_bytes(Chain(("4 bits",), graph=130_000, **of_both)) == 166_000


def test_no_chain_fits():
    """The nearest one is that of the limit that is exceeded most."""
    with pytest.raises(ValueError, match=r"Nearest comes prune \+ 8 bits, with 0.37 MB"):
        choose_chain(CHAINS, megabytes=0.1, milliseconds=10, speeds=SPEEDS)
