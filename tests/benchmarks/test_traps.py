"""TRAPS.md names guards that exist, and the cheatsheet shows the ten worst rows."""

from __future__ import annotations

import ast
import re

from benchmarks import traps
from tests.test_architecture import EVERY_FILE, parse


def known_names() -> set[str]:
    """Functions, classes and arguments of the package, and what it imports by name."""
    names = set()
    for path in EVERY_FILE:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.ImportFrom):
                names |= {alias.name for alias in node.names}
    return names


def named_guards(text: str) -> set[str]:
    """Names in backticks: `f`, `Class.method`, `f(x).attribute`; a setting `a=b` is none."""
    found = set()
    for code in re.findall(r"`([^`]+)`", text):
        bare = re.sub(r"\([^)]*\)", "", code)
        if re.fullmatch(r"\w+(\.\w+)*", bare):
            found |= set(bare.split("."))
    return found


def test_every_guard_exists():
    """The mistake: a renamed function leaves a reader with a guard that nobody can find."""
    known = known_names() | {"from_pretrained", "target_parameters"}  # of transformers, of peft
    named = {trap.symptom: named_guards(trap.guard) for trap in traps.rows()}
    assert {symptom: names - known for symptom, names in named.items() if names - known} == {}
    assert sum(bool(names) for names in named.values()) > 30, "the names are read at all"
    assert len(traps.worst().splitlines()) == 12, "ten rows and a head"
