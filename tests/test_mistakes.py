"""The list of planted mistakes keeps up with the code; planting them is a command of its own."""

from pathlib import Path

import pytest

from tests.mistakes import MISTAKES

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_can_be_planted(mistake):
    """Catches a list that is out of date: a text that is gone would plant nothing."""
    source = (ROOT / "recipes_lib" / mistake.file).read_text(encoding="utf-8")
    assert source.count(mistake.right) == 1
    assert all((ROOT / "tests" / test).exists() for test in mistake.tests)
