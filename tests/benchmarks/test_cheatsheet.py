"""The cheatsheet is short, fits the width that GitHub gives it, and has every technique."""

from __future__ import annotations

import re

from tests.test_architecture import ROOT, TECHNIQUES

CHEATSHEET = ROOT / "CHEATSHEET.md"
WIDEST_CODE = 96  # letters, in the 840 pixels that GitHub shows
MOST_LINES = 400


def lines(path):
    return path.read_text(encoding="utf-8").splitlines()


def test_code_fits_and_the_page_is_short():
    """The mistake: a page that nobody reads beside a notebook."""
    assert len(lines(CHEATSHEET)) < MOST_LINES
    blocks = re.findall(r"^```.*?\n(.*?)^```", CHEATSHEET.read_text(encoding="utf-8"), re.S | re.M)
    code = [line for block in blocks for line in block.splitlines()]
    assert [line for line in code if len(line) > WIDEST_CODE] == []


def test_every_technique_has_a_row():
    """The mistake: a new technique that nobody finds from its symptom."""
    table = "\n".join(line for line in lines(CHEATSHEET) if line[:1] == "|")
    links = [path.relative_to(ROOT).as_posix() for path in TECHNIQUES]
    assert [link for link in links if f"]({link})" not in table] == []


def test_no_disturbed_time_is_shown():
    """The mistake: "2.72× (1.25–13.82)" as the price of a recipe."""
    for low, high in re.findall(
        r"\(([\d.]+)[–-]([\d.]+)\)", CHEATSHEET.read_text(encoding="utf-8")
    ):
        assert float(high) <= 1.5 * float(low), f"({low}–{high})"
