"""Cards of the cheatsheet say what the docstrings say."""

from __future__ import annotations

import pytest

from benchmarks import cards
from tests.test_architecture import TECHNIQUES

DOCSTRING = """Short steps: walk slowly.

Problem    Long steps tire.
Idea       Walk:

               left, right

Saves      Breath: a third
           of it.
Costs      Time.
Use when   Uphill.
Not when   Downhill.
In production `walk(slow=True)`.
Source     A walker.

Traps: this is no part of the source.

    nor is this
"""


def test_a_section_is_one_paragraph_and_ends_with_its_indentation():
    found = cards.sections(DOCSTRING)
    assert found["Saves"] == "Breath: a third of it."
    assert found["In production"] == "`walk(slow=True)`."
    assert found["Source"] == "A walker."


def test_every_technique_has_a_whole_card():
    """The mistake: a docstring that is laid out otherwise loses its card, or half of it."""
    without = [path.name for path in TECHNIQUES if not cards.is_technique(path)]
    assert without == []
    for path in TECHNIQUES:
        text = cards.card(path)
        assert all(f"**{name}.** " in text for name in cards.SHOWN), path.name


def test_an_unknown_room_is_an_error():
    with pytest.raises(ValueError, match="cards:kitchen"):
        cards.of_room("kitchen")
