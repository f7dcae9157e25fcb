"""Python's own standard library as text: its modules, and its functions with their docstrings.

Both are split by *module*, so no module is in training and in validation.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import random
import sysconfig
from pathlib import Path

INSTRUCTION = "Write the docstring of this Python function.\n\n"
# Not text of the library proper: tests, generated tables, installed packages.
SKIP = ("test", "tests", "idle_test", "site-packages", "lib2to3", "encodings", "pydoc_data", "ensurepip", "turtledemo")


def modules(split: str) -> list[Path]:
    """Source files of one split. A module or package belongs to one split by the hash of its name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if any(part in SKIP or part.startswith("test_") for part in parts):
            continue
        held_out = hashlib.sha256(parts[0].encode()).digest()[0] % 8 == 0
        if held_out == (split == "validation"):
            found.append(path)
    return found


@functools.lru_cache(maxsize=2)
def docstring_pairs(split: str) -> tuple[dict[str, str], ...]:
    """Functions with a docstring: the source without it is the prompt, its first paragraph the completion."""
    pairs = []
    for path in modules(split):
        source = path.read_text(encoding="utf-8", errors="replace")
        try:
            tree = ast.parse(source)
        except SyntaxError:  # templates and Python 2 left-overs
            continue
        lines = source.splitlines()
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or len(node.body) < 2:
                continue
            completion = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            if len(completion.split()) < 4:  # "Helper." says nothing about the code
                continue
            code = lines[node.lineno - 1 : node.body[0].lineno - 1] + lines[node.body[0].end_lineno : node.end_lineno]
            code = "\n".join(line.removeprefix(" " * node.col_offset) for line in code)
            pairs.append({"prompt": INSTRUCTION + code, "completion": completion})
    # Some functions stand in two modules: once is enough, and one that is held out is not trained on.
    held_out = set() if split == "validation" else {pair["prompt"] for pair in docstring_pairs("validation")}
    unique = [pair for prompt, pair in {p["prompt"]: p for p in pairs}.items() if prompt not in held_out]
    random.Random(0).shuffle(unique)
    return tuple(unique)
