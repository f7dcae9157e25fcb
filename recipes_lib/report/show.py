"""Show the code that a notebook talks about, so that text and tests speak of the same lines.

show(apply_activation_checkpointing)         highlighted in Jupyter, plain in a terminal
shown(apply_activation_checkpointing)        the same lines as a string
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any


def show(*functions: Any) -> None:
    """Show the source of functions as it is in the package, without their docstrings."""
    code = shown(*functions)
    if _in_jupyter():
        from IPython.display import display

        display(in_markdown(code), raw=True)
    else:
        print(code)


def shown(*functions: Any) -> str:
    """The lines that `show` shows. Two empty lines stand between functions, as in a file."""
    sources = []
    for function in functions:
        # A method is indented, which on its own is no valid Python.
        source = textwrap.dedent(inspect.getsource(function))
        sources.append("\n".join(without_docstring(source)))
    return "\n\n\n".join(sources)


def in_markdown(code: str) -> dict[str, str]:
    """The forms of an output by their MIME type: Markdown is highlighted, text is the fallback."""
    return {"text/markdown": f"```python\n{code}\n```", "text/plain": code}


def without_docstring(source: str) -> list[str]:
    """The lines to show of a function or class, less those of its docstring."""
    lines = source.splitlines()
    definition = ast.parse(source).body[0]
    if ast.get_docstring(definition) is None:
        return lines
    docstring = definition.body[0]
    after = lines[docstring.end_lineno :]
    # The empty line that a docstring leaves behind would separate nothing.
    if after and not after[0].strip():
        after = after[1:]
    return lines[: docstring.lineno - 1] + after


def _in_jupyter() -> bool:
    """Whether somebody can display Markdown. A terminal, even that of IPython, cannot."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    shell = get_ipython()
    return shell is not None and hasattr(shell, "kernel")
