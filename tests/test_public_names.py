"""What readers type stays: names that notebooks, pages and launch files import, and signatures."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SIGNATURES = Path(__file__).with_name("signatures.txt")
FENCE = re.compile(r"^```python\n(.*?)^```", re.S | re.M)


def sources() -> Iterator[tuple[str, str]]:
    """Each piece of Python that people read or run outside of the package."""
    for folder in ("notebooks/source", "launch", "benchmarks", "scripts"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("launch/*.md")]:
        for block in FENCE.findall(path.read_text(encoding="utf-8")):
            yield path.name, block


def imports(source: str) -> Iterator[tuple[str, str]]:
    without_magic = re.sub(r"^(\s*)[!%].*$", r"\1pass", source, flags=re.M)
    for node in ast.walk(ast.parse(without_magic)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("recipes_lib"):
            yield from ((node.module, alias.name) for alias in node.names)


def exists(module: str, name: str) -> bool:
    try:
        if hasattr(importlib.import_module(module), name):
            return True
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return False
    return True


def test_every_imported_name_exists():
    """The mistake: a function moves, and a notebook finds out after minutes, in its last cell."""
    missing = []
    for where, source in sources():
        missing += [f"{where}: {m}.{n}" for m, n in imports(source) if not exists(m, n)]
    assert missing == []


def test_signatures_are_as_they_were():
    """The mistake: an option is renamed, and every reader's ten lines break."""
    changed = []
    for line in SIGNATURES.read_text(encoding="utf-8").splitlines():
        address, _, expected = line.partition("(")
        module, _, name = address.rpartition(".")
        function = getattr(importlib.import_module(f"recipes_lib.{module}"), name)
        got = parameters(function)
        if got != f"({expected}":
            changed.append(f"{address}{got}")
    assert changed == []


def parameters(function: object) -> str:
    """Names and defaults, without types; `check` belongs to all that prove themselves."""
    shown = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name != "check":
            plain = parameter.replace(annotation=inspect.Parameter.empty)
            shown.append(f"*{plain}" if parameter.kind == parameter.VAR_POSITIONAL else str(plain))
    return re.sub(r"<(function|class) '?([\w.]+)'?[^>]*>", r"\2", f"({', '.join(shown)})")
