"""A table as markdown: its lines, and below it the notes that say where it was measured."""

from __future__ import annotations


def line(cells: list[str]) -> str:
    """One row."""
    return f"| {' | '.join(cells)} |"


def table(columns: list[str], lines: list[str], notes: list[str], *, names: int = 1) -> str:
    """A table with `notes` below it; the first `names` columns hold text, all others numbers."""
    numbers = len(columns) - names
    rule = "|" + "---|" * names + "--:|" * numbers
    return "\n".join([line(columns), rule, *lines, "", f"*{' '.join(notes)}*"])
