"""The sizes of every notebook fit the cards that they are for. Predicted, without a card."""

import pytest

from benchmarks.on_your_card import (
    NOTEBOOKS,
    TIERS,
    in_words,
    learner,
    long_texts,
    sizes_of,
    sizes_of_make_gpu,
    writing,
)
from benchmarks.record import newest
from benchmarks.sizes import TIER_SIZES
from recipes_lib.core.measure.machine import GIB


@pytest.fixture(scope="module")
def rows():
    """What `python -m benchmarks.on_your_card` has recorded."""
    return newest("on_your_card").rows


@pytest.mark.parametrize("tier", TIERS)
def test_every_notebook_fits_its_card(rows, tier):
    """The mistakes: sizes that nobody could try; a part whose cap is above what its card has."""
    assert TIER_SIZES[tier]["context"]["cap"] < 0.98 * TIERS[tier].memory_bytes
    for which in (*NOTEBOOKS, "make gpu"):
        need = rows[f"{tier} {which}"]
        largest = need.get("reserved_bytes", need["allocated_bytes"])
        assert 0.1 * GIB < largest < TIERS[tier].for_tensors, which


@pytest.mark.parametrize("tier", TIERS)
def test_the_records_are_of_todays_sizes(rows, tier):
    """The mistake: sizes change, and the page promises the old ones."""
    sized = {"01": sizes_of("01")[tier], "make gpu": sizes_of_make_gpu(tier)}
    sized["05"] = learner(sizes_of("05")[tier])
    for which, sizes in sized.items():
        assert rows[f"{tier} {which}"]["sizes"] == in_words(sizes), (
            "run `python -m benchmarks.on_your_card`"
        )
    for which, need_of in (("03", writing), ("04", long_texts)):
        need = need_of(sizes_of(which)[tier], TIERS[tier])
        assert need == {key: rows[f"{tier} {which}"][key] for key in need}
