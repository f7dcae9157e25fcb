"""The sizes of every notebook fit the cards that they are for. Arithmetic, without a card."""

import pytest

from benchmarks import on_your_card
from benchmarks.on_your_card import CARDS, USABLE, needs
from benchmarks.sizes import TIER_SIZES
from recipes_lib.core.machine import GIB


@pytest.mark.parametrize("tier", CARDS)
def test_every_notebook_fits_its_card(tier):
    """The mistake: sizes that nobody could try, with no room for context and fragments."""
    _, gib = CARDS[tier]
    for need in needs(tier):
        assert 0.1 < need.gib < USABLE * gib, need


def test_the_page_is_that_of_today():
    """The mistake: sizes change, and the page promises the old ones."""
    assert on_your_card.PAGE.read_text(encoding="utf-8") == on_your_card.page(), (
        "run `python -m benchmarks.on_your_card`"
    )


@pytest.mark.parametrize("tier", CARDS)
def test_the_limits_of_make_gpu_are_below_the_card(tier):
    """The mistake: a part that is capped above what its card has runs out in the last minute."""
    _, gib = CARDS[tier]
    for part in ("ablation", "context"):
        assert TIER_SIZES[tier][part]["cap"] < 0.98 * gib * GIB
