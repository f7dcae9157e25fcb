"""Print the code that a notebook talks about, so that text and tests speak of the same lines.

show(apply_activation_checkpointing)
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any


def show(*functions: Any) -> None:
    """Print the source of functions as it is in the package, without docstrings and empty lines."""
    for function in functions:
        # A method is indented, which on its own is no valid Python.
        source = textwrap.dedent(inspect.getsource(function))
        for line in without_docstring(source):
            if line.strip():
                print(line)


def without_docstring(source: str) -> list[str]:
    """The lines of one function or class, less those of its docstring."""
    lines = source.splitlines()
    definition = ast.parse(source).body[0]
    if ast.get_docstring(definition) is None:
        return lines
    docstring = definition.body[0]
    return lines[: docstring.lineno - 1] + lines[docstring.end_lineno :]
