"""The table of the longest texts by model, method and card."""

from __future__ import annotations

from functools import partial

import pytest

from benchmarks import long_cards
from benchmarks.long_cards import METHODS, MODELS, ROOMS, Lengths, build_of, room_of
from benchmarks.render import thousands
from recipes_lib.core.model import SHAPES
from recipes_lib.core.predict import CARDS, predict

TILE = 32


@pytest.mark.parametrize("method", METHODS)
def test_the_longest_text_fills_its_room(method, monkeypatch):
    """The mistake: a line through lengths at which weights are the peak, or too few blocks."""
    monkeypatch.setattr(long_cards, "LENGTHS", (32, 16 * TILE, 32 * TILE))
    lengths = Lengths("tiny-llama", method, "every recipe", tile=TILE)
    monkeypatch.setattr(lengths, "layers", 5)
    room = 2 * lengths.peak(32 * TILE)
    tokens = lengths.longest(room) // TILE * TILE
    step = partial(build_of, "tiny-llama", method, "every recipe", tile=TILE)
    found = predict(step(layers=5, tokens=tokens), card=CARDS["L4"]).peak
    assert found == pytest.approx(room, rel=0.05)
    assert lengths.breaks_first(room) == "one block"
    nothing = lengths.peak(32) - 1
    assert (lengths.longest(nothing), lengths.breaks_first(nothing)) == (0, "weights and states")


def test_rooms_are_below_the_cards():
    for size, card in ROOMS.items():
        assert 0.85 < room_of(CARDS[card]) / CARDS[card].memory_bytes < 0.95, size
    assert set(MODELS) < set(SHAPES)


def test_tokens_in_words():
    assert [thousands(each) for each in (480, 7_633, 139_143, 2_067_964)] == [
        "480",
        "7.6K",
        "139K",
        "2.1M",
    ]
