"""Cards of the techniques: what each saves and costs, taken from the docstring of its file.

    Saves      (1 - 1/k) of activations and loss      ->   <details><summary>…</summary>
    Costs      Gradients stay alive between …                **Saves.** (1 - 1/k) of activations …
                                                             </details>

A docstring is the only place where this is written. So a card cannot say something else.
"""

from __future__ import annotations

import ast
import html
import re
from pathlib import Path

LIBRARY = Path(__file__).resolve().parents[1] / "recipes_lib"
SECTIONS = ("Problem", "Idea", "Saves", "Costs", "Use when", "Not when", "In production", "Source")
SHOWN = ("Saves", "Costs", "Use when", "Not when", "In production")


def of_room(room: str) -> str:
    """The cards of the techniques in recipes_lib/<room>, as markdown.

    Raises ValueError for a room without techniques.
    """
    paths = [path for path in sorted((LIBRARY / room).glob("*.py")) if is_technique(path)]
    if not paths:
        raise ValueError(f"cards:{room}: no technique in recipes_lib/{room}, name another folder")
    return "\n\n".join(card(path) for path in paths)


def is_technique(path: Path) -> bool:
    """Whether the docstring has every section. Parts of a technique and __init__.py have none."""
    found = sections(docstring(path))
    return all(name in found for name in SECTIONS)


def card(path: Path) -> str:
    """One technique, folded up below its title."""
    text = docstring(path)
    title, _, about = text.splitlines()[0].partition(": ")
    found = sections(text)
    link = path.relative_to(LIBRARY.parent).as_posix()
    summary = f"<b>{html.escape(title)}</b>"
    if about:
        summary += f": {html.escape(about, quote=False)}"
    lines = [f"<details><summary>{summary}</summary>", ""]
    for name in SHOWN:
        lines += [f"**{name}.** {found[name]}", ""]
    lines += [f"[The file]({link})", "", "</details>"]
    return "\n".join(lines)


def docstring(path: Path) -> str:
    """The docstring of a file, or nothing."""
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def sections(text: str) -> dict[str, str]:
    """The sections of a docstring by name, each as one paragraph.

    A section begins with its name at the margin. Its further lines are indented; it ends at the
    next line that is not.
    """
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        begins = re.match(rf"({'|'.join(SECTIONS)}) {{2,}}(\S.*)|(In production) +(\S.*)", line)
        if begins:
            name = begins[1] or begins[3]
            current = [begins[2] or begins[4]]
            found[name] = current
        elif line.startswith(" "):
            current.append(line.strip())
        elif line:
            current = []  # a paragraph outside of all sections
    return {name: " ".join(" ".join(lines).split()) for name, lines in found.items()}
