"""Write docs/file-map.md from the tables in the package's `__init__.py` files.

    python -m tools.file_map

Every folder of the package has a docstring with one line per file. The map is these tables, in the
order of the floors, with a link to each file.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIB = ROOT / "recipes_lib"
MAP = ROOT / "docs" / "file-map.md"

# What stands in front of the tables; the rest of the repository has no table of its own.
HEAD = """\
# File map

One technique is one file, its test has the same name, and no technique imports another. There are
five floors, from the command line down to what everything stands on; a floor uses only those below
it. A file whose name begins with another's, such as `block_sparse_cpu.py`, is a part of that one.

*Written by `make texts` from the docstrings of the package.*

| folder | what it holds |
|---|---|
| [recipes_lib](../recipes_lib) | the package: the tables below |
| [notebooks](../notebooks) | the executed notebooks, and the program that executes them |
| [notebooks/source](../notebooks/source) | the notebooks as text: the only form edited by hand |
| [benchmarks](../benchmarks) | measures, records and renders numbers; `results` holds the runs |
| [tests](../tests) | mirrors the package; beside it tests of the rules, notebooks and pages |
| [tools](../tools) | looks after the repository: its address, the readers' copies, this map |
| [docs](.) | these pages |
"""


def table_of(init: Path) -> dict[str, str]:
    """The lines "name   what it is" of a docstring, by name."""
    docstring = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8")))
    return dict(re.findall(r"^(\w+) {2,}(.+)$", docstring, re.MULTILINE))


def section(folder: Path) -> str:
    """One folder: its first line as a sentence, and a row for each of its files."""
    init = folder / "__init__.py"
    docstring = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8")))
    title = folder.relative_to(LIB).as_posix()
    lines = [f"## {title}", "", docstring.splitlines()[0], "", "| file | what it is |", "|---|---|"]
    for name, words in table_of(init).items():
        path = folder / f"{name}.py"
        if not path.exists():  # a folder in the folder, which has a section of its own
            path = folder / name
        link = path.relative_to(ROOT).as_posix()
        lines.append(f"| [{path.name}](../{link}) | {words.removeprefix('... ')} |")
    return "\n".join(lines) + "\n"


def file_map() -> str:
    """The whole page: the folders in the order of the package's own docstring."""
    sections = [HEAD]
    for name in table_of(LIB / "__init__.py"):
        sections.append(section(LIB / name))
        for init in sorted((LIB / name).glob("*/__init__.py")):
            sections.append(section(init.parent))
    return "\n".join(sections)


if __name__ == "__main__":
    MAP.write_text(file_map(), encoding="utf-8")
    print(f"written: {MAP.relative_to(ROOT).as_posix()}")
