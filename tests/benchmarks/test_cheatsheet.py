"""The cheatsheet and the traps can be read at the width that GitHub gives them."""

from __future__ import annotations

import re

import pytest

from benchmarks import traps
from tests.test_architecture import ROOT, TECHNIQUES

CHEATSHEET = ROOT / "CHEATSHEET.md"
# GitHub shows some 840 pixels: 96 letters of code, or 90 in a table of four columns.
WIDEST_CODE = 96
WIDEST_ROW = 90
MOST_LINES = 400

TEXTS = [CHEATSHEET, traps.TRAPS]


def lines(path):
    return path.read_text(encoding="utf-8").splitlines()


def shown(cell):
    """A cell as a reader sees it: without addresses and markers."""
    without_links = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r"<!--.*?-->", "", cell))
    return without_links.replace("`", "").replace("*", "")


def tables(path):
    """The rows of each table, as lists of cells."""
    found = [[]]
    for line in lines(path):
        if line.startswith("| "):
            found[-1].append([shown(cell) for cell in line.strip("| ").split(" | ")])
        elif found[-1] and not line.startswith("|"):
            found.append([])
    return [table for table in found if table]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_tables_fit_without_scrolling(path):
    """A column is at least as wide as its widest word: long code in several columns is too much."""
    for table in tables(path):
        widest = [
            max(len(word) for cell in column for word in cell.split(" ")) for column in zip(*table)
        ]
        assert sum(widest) <= WIDEST_ROW, table[0]


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
