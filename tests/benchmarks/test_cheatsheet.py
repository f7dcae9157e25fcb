"""The cheatsheet and the traps can be read at the width that GitHub gives them."""

from __future__ import annotations

import pytest

from benchmarks import markdown, page, traps
from tests.test_architecture import ROOT, TECHNIQUES

# GitHub shows some 840 pixels: 96 letters of code, or 90 in a table of four columns.
WIDEST_CODE = 96
WIDEST_ROW = 90

TEXTS = [page.TEXT, traps.TRAPS]


def sections(path):
    return markdown.sections(path.read_text(encoding="utf-8")).values()


def widest_word(cells):
    texts = ["".join(run.text for run in markdown.runs(cell)) for cell in cells]
    return max(len(word) for text in texts for word in text.split(" "))


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_tables_fit_without_scrolling(path):
    """A column is at least as wide as its widest word: long code in several columns is too much."""
    wide = []
    for section in sections(path):
        if section.table:
            columns = zip(*section.table, strict=True)  # as many cells in each row
            if sum(widest_word(column) for column in columns) > WIDEST_ROW:
                wide.append(section.title)
    assert wide == []


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_code_fits_without_scrolling(path):
    lines = [line for section in sections(path) for line in section.code]
    assert [line for line in lines if len(line) > WIDEST_CODE] == []


def test_scenarios_have_four_columns():
    """The mistake: a column for each thing that one could say."""
    headers = [section.table[0] for section in sections(page.TEXT) if section.table]
    scenarios = [header for header in headers if header[0] == "symptom" and len(header) > 3]
    assert len(scenarios) >= 3
    assert {tuple(header[1:]) for header in scenarios} == {
        ("recipe", "measured", "production switch")
    }


def test_every_technique_has_a_row():
    """Its card comes by itself. A row with its symptom and its switch has to be written."""
    rows = [line for line in page.TEXT.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    table = "\n".join(rows)
    links = [path.relative_to(ROOT).as_posix() for path in TECHNIQUES]
    assert [link for link in links if f"]({link})" not in table] == []
