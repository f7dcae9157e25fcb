"""Write docs/file-map.md from the tables in the package's `__init__.py` files: make texts.

The map is these tables, in the order of the floors, with a link to each file.
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

A technique is a file, or a folder whose `__init__.py` is the technique; its test has the same name.
There are five floors, from the command line down to what everything stands on; a floor uses only
those below it.

*Written by `make texts` from the docstrings of the package.*

| folder | what it holds |
|---|---|
| [recipes_lib](../recipes_lib) | the package: the tables below |
| [notebooks](../notebooks) | the executed notebooks, and the program that executes them |
| [notebooks/source](../notebooks/source) | the notebooks as text: the only form edited by hand |
| [benchmarks](../benchmarks) | measures, records and renders numbers; `results` holds the runs |
| [tests](../tests) | mirrors the package; beside it tests of the rules, notebooks and pages |
| [scripts](../scripts) | the best recipe of a notebook as one training script |
| [launch](../launch) | trainings on many ranks: torchrun, accelerate, SLURM, Megatron |
| [tools](../tools) | writes this map |
| [docs](.) | these pages |
"""


def table_of(init: Path) -> dict[str, str]:
    """The lines "name   what it is" of a docstring, by name."""
    docstring = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8")))
    return dict(re.findall(r"^(\w+) {2,}(.+)$", docstring, re.MULTILINE))


def section(folder: Path) -> str:
    """One room: its first line as a sentence, and a row for each file or folder in it."""
    init = folder / "__init__.py"
    docstring = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8")))
    title = folder.relative_to(LIB).as_posix()
    lines = [f"## {title}", "", docstring.splitlines()[0], "", "| file | what it is |", "|---|---|"]
    for name, words in table_of(init).items():
        path = folder / f"{name}.py"
        if not path.exists():
            path = folder / name
        link = path.relative_to(ROOT).as_posix()
        lines.append(f"| [{name}](../{link}) | {words.removeprefix('... ')} |")
    return "\n".join(lines) + "\n"


def file_map() -> str:
    """The whole page: the rooms in the order of the package's own docstring."""
    sections = [HEAD]
    for name in table_of(LIB / "__init__.py"):
        sections.append(section(LIB / name))
        if name == "core":  # the only room with rooms in it
            parts = [LIB / name / part for part in table_of(LIB / name / "__init__.py")]
            sections += [section(part) for part in parts if part.is_dir()]
    return "\n".join(sections)


if __name__ == "__main__":
    MAP.write_text(file_map(), encoding="utf-8")
    print(f"written: {MAP.relative_to(ROOT).as_posix()}")
