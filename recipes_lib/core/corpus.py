"""Python's own standard library as text: its modules, and its functions with their docstrings.

Both are split by *module*, so no module is in training and in validation.
"""

from __future__ import annotations

import ast
import functools
import gc
import hashlib
import os
import random
import sysconfig
from collections import deque
from collections.abc import Iterator
from pathlib import Path

INSTRUCTION = "Write the docstring of this Python function.\n\n"
# Not text of the library proper: tests, generated tables, installed packages.
SKIP = (
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "lib2to3",
    "encodings",
    "pydoc_data",
    "ensurepip",
    "turtledemo",
)
TOGETHER = 32  # modules whose functions are mixed


@functools.lru_cache(maxsize=2)
def modules(split: str) -> tuple[Path, ...]:
    """Source files of one split. A module or package belongs to one split by the hash of its name."""
    root, found = Path(sysconfig.get_paths()["stdlib"]), []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if not _skipped(name)]  # where os.walk does not go
        found += [
            Path(folder, name) for name in names if name.endswith(".py") and not _skipped(name[:-3])
        ]
    return tuple(
        path
        for path in sorted(found)
        if _held_out(path.relative_to(root)) == (split == "validation")
    )


def _skipped(name: str) -> bool:
    return name in SKIP or name.startswith("test_")


def _held_out(path: Path) -> bool:
    package = path.with_suffix("").parts[0]
    return hashlib.sha256(package.encode()).digest()[0] % 8 == 0


def docstring_pairs(split: str) -> Iterator[dict[str, str]]:
    """Functions with a docstring: the source without it is the prompt, its first paragraph the completion.

    The order is shuffled, the same each time, and modules are read when they are needed: the first pairs come soon.
    """
    paths = list(modules(split))
    random.Random(0).shuffle(paths)
    # Some functions stand in two modules: once is enough, and one that is held out is not trained on.
    seen = (
        set()
        if split == "validation"
        else {pair["prompt"] for pair in docstring_pairs("validation")}
    )
    for start in range(0, len(paths), TOGETHER):
        for pair in _pairs(tuple(paths[start : start + TOGETHER])):
            if pair["prompt"] not in seen:
                seen.add(pair["prompt"])
                yield dict(pair)


@functools.lru_cache
def _pairs(paths: tuple[Path, ...]) -> list[dict[str, str]]:
    """The pairs of some modules, shuffled."""
    collecting = gc.isenabled()
    gc.disable()  # syntax trees are millions of objects without a cycle: three times as fast
    try:
        pairs = [pair for path in paths for pair in _pairs_of(path)]
    finally:
        if collecting:
            gc.enable()
    random.Random(0).shuffle(pairs)
    return pairs


def _pairs_of(path: Path) -> Iterator[dict[str, str]]:
    source = path.read_text(encoding="utf-8", errors="replace")
    try:
        tree = ast.parse(source)
    except SyntaxError:  # templates and Python 2 left-overs
        return
    lines = source.splitlines()
    for node in _functions(tree):
        completion = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        if len(completion.split()) < 4:  # "Helper." says nothing about the code
            continue
        code = (
            lines[node.lineno - 1 : node.body[0].lineno - 1]
            + lines[node.body[0].end_lineno : node.end_lineno]
        )
        code = "\n".join(line.removeprefix(" " * node.col_offset) for line in code)
        yield {"prompt": INSTRUCTION + code, "completion": completion}


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """Functions of more than one statement. Like `ast.walk`, without the expressions, which hold none."""
    todo: deque[ast.AST] = deque([tree])
    while todo:
        node = todo.popleft()
        if isinstance(node, ast.FunctionDef) and len(node.body) > 1:
            yield node
        inner = (ast.stmt, ast.excepthandler, ast.match_case)
        todo.extend(child for child in ast.iter_child_nodes(node) if isinstance(child, inner))
