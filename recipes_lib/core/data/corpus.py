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

from recipes_lib.core.checks import check_choice

INSTRUCTION = "Write the docstring of this Python function.\n\n"
# Not text of the library proper: tests, generated tables, installed packages.
SKIP = {"test", "tests", "idle_test", "site-packages", "lib2to3", "encodings", "pydoc_data"}
SKIP |= {"ensurepip", "turtledemo"}
TOGETHER = 32  # modules whose functions are mixed
SPLITS = ("train", "validation")


def load_text(*, split: str = "train") -> str:
    """The sources of the standard library as one long text, module after module."""
    check_choice(SPLITS, split=split)
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in modules(split)]
    return "\n\n".join(texts)


@functools.lru_cache(maxsize=2)
def modules(split: str) -> tuple[Path, ...]:
    """Source files of the standard library: the hash of its name puts a module into one split."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, inner, names in os.walk(root):
        # os.walk goes only where this list says: it is changed in place.
        inner[:] = [name for name in inner if not _skipped(name)]
        for name in names:
            path = Path(folder, name)
            if path.suffix == ".py" and not _skipped(path.stem):
                found.append(path)
    held_out = split == "validation"
    return tuple(path for path in sorted(found) if _held_out(path.relative_to(root)) == held_out)


def _skipped(name: str) -> bool:
    return name in SKIP or name.startswith("test_")


def _held_out(path: Path) -> bool:
    package = path.with_suffix("").parts[0]
    return hashlib.sha256(package.encode()).digest()[0] % 8 == 0


def docstring_pairs(split: str) -> Iterator[dict[str, str]]:
    """Functions with a docstring: the source without it, and its first paragraph as completion.

    The order is shuffled, the same each time, and modules are read when they are needed: the first
    pairs come soon.
    """
    paths = list(modules(split))
    random.Random(0).shuffle(paths)
    # Some functions stand in two modules. Once is enough, and none that is held out is trained on.
    seen = set()
    if split == "train":
        seen = {pair["prompt"] for pair in docstring_pairs("validation")}
    for start in range(0, len(paths), TOGETHER):
        for pair in _pairs_of_modules(tuple(paths[start : start + TOGETHER])):
            if pair["prompt"] not in seen:
                seen.add(pair["prompt"])
                yield dict(pair)


@functools.lru_cache
def _pairs_of_modules(paths: tuple[Path, ...]) -> list[dict[str, str]]:
    """The pairs of some modules of the standard library, shuffled."""
    collecting = gc.isenabled()
    gc.disable()  # syntax trees are millions of objects without a cycle: three times as fast
    try:
        pairs = [pair for path in paths for pair in _pairs_of_module(path)]
    finally:
        if collecting:
            gc.enable()
    random.Random(0).shuffle(pairs)
    return pairs


def _pairs_of_module(path: Path) -> Iterator[dict[str, str]]:
    """The functions of one file with the first paragraphs of their docstrings."""
    source = path.read_text(encoding="utf-8", errors="replace")
    try:
        tree = ast.parse(source)
    except SyntaxError:  # templates and Python 2 left-overs
        return
    lines = source.splitlines()
    for node in _functions(tree):
        docstring = ast.get_docstring(node) or ""
        words = docstring.split("\n\n")[0].split()  # of the first paragraph
        if len(words) < 4:  # "Helper." says nothing about the code
            continue
        yield {
            "prompt": INSTRUCTION + _without_docstring(node, lines),
            "completion": " ".join(words),
        }


def _without_docstring(node: ast.FunctionDef, lines: list[str]) -> str:
    """The prompt of a pair: a function without its docstring and without its indentation."""
    docstring = node.body[0]
    head = lines[node.lineno - 1 : docstring.lineno - 1]
    rest = lines[docstring.end_lineno : node.end_lineno]
    indentation = " " * node.col_offset
    return "\n".join(line.removeprefix(indentation) for line in head + rest)


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """Functions of a module with more than one statement, in the order of `ast.walk`."""
    # Expressions hold no function: to leave them out is most of the speed.
    statements = (ast.stmt, ast.excepthandler, ast.match_case)
    todo: deque[ast.AST] = deque([tree])
    while todo:
        node = todo.popleft()
        if isinstance(node, ast.FunctionDef) and len(node.body) > 1:
            yield node
        children = ast.iter_child_nodes(node)
        todo.extend(child for child in children if isinstance(child, statements))
