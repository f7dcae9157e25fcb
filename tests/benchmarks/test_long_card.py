"""The page about 262,144 tokens on a card of 24 GB."""

from __future__ import annotations

import re

from benchmarks import long_card

SMALL = {"shape": "tiny-llama", "tokens": 4096, "in_groups": False, "in_flight": 1}


def test_with_the_inputs_away_more_blocks_need_no_more():
    """The mistake: the peak of a few blocks, given as that of all, while the inputs pile up."""
    few = long_card.step_bytes(blocks=3, **SMALL)
    many = long_card.step_bytes(blocks=6, **SMALL)
    assert few <= many < 1.05 * few


def test_the_page_adds_up():
    """The mistake: a peak without its weights, or a verdict that its row does not give."""
    rows = re.findall(r"\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| (.+) \|", long_card.PAGE.read_text())
    assert len(rows) == len(long_card.WAYS)
    for step, fixed, peak, verdict in rows:
        assert abs(float(step) + float(fixed) - float(peak)) <= 0.1
        assert (verdict == "too large") == (float(peak) > long_card.CARD)
        assert float(fixed) == round(long_card.fixed_bytes() / 2**30, 1)
