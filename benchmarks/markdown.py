"""The cheatsheet's markdown, read for the printed page: its sections, their tables and code."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

Cells = list[str]


@dataclass
class Section:
    """What stands below one heading."""

    title: str
    paragraphs: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)  # the lines of its first fenced block
    table: list[Cells] = field(default_factory=list)  # its header, then its rows


@dataclass(frozen=True)
class Run:
    """A piece of text in one style: "plain", "bold" or "code"."""

    text: str
    style: str


def sections(text: str) -> dict[str, Section]:
    """The sections of a text by their titles, of all levels."""
    found: dict[str, Section] = {}
    current = Section("")
    fence = ""  # "```text" while inside of such a block
    for line in without_comments(text).splitlines():
        if line.startswith("```"):
            fence = "" if fence else line
        elif fence:
            if fence == "```text":
                current.code.append(line)
        elif line.startswith("#"):
            current = Section(line.lstrip("# "))
            found[current.title] = current
        elif line.startswith("|"):
            current.table += [cells for cells in [cells_of(line)] if not is_rule(cells)]
        elif line:
            current.paragraphs.append(line)
    return found


def cells_of(line: str) -> Cells:
    """The cells of one line of a table."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def is_rule(cells: Cells) -> bool:
    """Whether this is the line between the header and the rows."""
    return all(re.fullmatch(r":?-+:?", cell) for cell in cells)


def without_comments(text: str) -> str:
    """The text without markers, which nobody sees."""
    return re.sub(r"<!--.*?-->", "", text)


def runs(text: str) -> list[Run]:
    """The pieces of one paragraph or cell; a link becomes its text."""
    text = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text)
    found = []
    for piece in re.split(r"(\*\*.+?\*\*|`[^`]+`|\*[^*\s][^*]*\*)", text):
        if piece.startswith("**"):
            found.append(Run(piece.strip("*").replace("`", ""), "bold"))
        elif piece.startswith("`"):
            found.append(Run(piece.strip("`"), "code"))
        elif piece:
            found.append(Run(piece.strip("*") if piece.startswith("*") else piece, "plain"))
    return found
