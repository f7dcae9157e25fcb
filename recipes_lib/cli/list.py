"""`python -m recipes_lib list`: every technique, its file and what it is.

The words are the first lines of the files' docstrings. They are read as text: nothing is imported.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from recipes_lib.cli.options import LIBRARY

WIDTH = 80  # columns of a terminal
INDENT = "    "
OTHER_FLOORS = ("cli", "core", "report", "workflows")


def list_techniques() -> None:
    """Every technique: a line with its file, and below it what it is."""
    for path, text in techniques():
        print(path.relative_to(LIBRARY).as_posix().removesuffix("/__init__.py"))
        first_line = text.splitlines()[0]
        print(textwrap.fill(first_line, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT))


def techniques() -> Iterator[tuple[Path, str]]:
    """The file of every technique, in alphabetical order, with its docstring."""
    for path in sorted(LIBRARY.rglob("*.py")):
        if path.relative_to(LIBRARY).parts[0] in OTHER_FLOORS:
            continue
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        # A table of contents, and a file that is a part of a technique, state no problem.
        if re.search(r"^Problem\b", text, re.MULTILINE):
            yield path, text
