"""The rules that keep the package readable, checked on the syntax tree of every file."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIB = ROOT / "recipes_lib"
FOLDERS = ["precision", "architecture", "attention", "memory", "training"]
FOLDERS += ["fine_tuning", "parallel", "inference", "compression", "edge"]
SECTIONS = ["Problem", "Idea", "Saves", "Costs", "Use when", "Not when", "In production", "Source"]
# The one technique that is by definition a composition.
ALLOWED = {("fine_tuning/qlora.py", "fine_tuning/lora.py")}
# Slow to import or not installed everywhere: only inside the function that needs them.
HEAVY = {"bitsandbytes", "torchao", "executorch", "deepspeed", "flash_attn", "liger_kernel"}
HEAVY |= {"peft", "datasets", "mlflow", "wandb"}


def modules(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")


def name(path: Path) -> str:
    return path.relative_to(LIB).as_posix()


EVERY_FILE = sorted(LIB.rglob("*.py"))
CORE = modules(LIB / "core")
TECHNIQUES = [path for folder in FOLDERS for path in modules(LIB / folder)]
for_each_technique = pytest.mark.parametrize("path", TECHNIQUES, ids=name)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


# --- 1. technique → core → third-party ------------------------------------------------------------


def imported_names(path: Path, lib: Path) -> Iterator[str]:
    """Dotted names that a file imports anywhere, also inside functions; relative ones resolved."""
    package = [lib.name, *path.relative_to(lib).parent.parts]
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base = [*base, *([node.module] if node.module else [])]
            yield from (".".join([*base, alias.name]) for alias in node.names)


def forbidden_imports(lib: Path) -> list[str]:
    """Imports of anything but core, from every file in a folder of the package."""
    found = []
    for path in sorted(lib.glob("*/**/*.py")):
        for dotted in imported_names(path, lib):
            parts = dotted.split(".")
            if parts[0] != lib.name or parts[1:2] == ["core"]:
                continue
            source, target = path.relative_to(lib).as_posix(), "/".join(parts[1:3]) + ".py"
            if (source, target) not in ALLOWED:
                found.append(f"{source} imports {dotted}")
    return found


def test_techniques_and_core_import_only_core():
    assert forbidden_imports(LIB) == []


@pytest.mark.parametrize(
    ("file", "line", "allowed"),
    [
        ("memory/a.py", "from recipes_lib.core.measure import measure", True),
        ("memory/a.py", "import torch", True),
        ("memory/a.py", "from ..core import measure", True),
        ("memory/a.py", "from recipes_lib.training.b import apply_b", False),
        ("memory/a.py", "import recipes_lib.training.b", False),
        ("memory/a.py", "from .c import apply_c", False),
        ("memory/a.py", "def f():\n    from recipes_lib.memory import c", False),
        ("core/measure.py", "from recipes_lib.memory.a import apply_a", False),
        ("fine_tuning/qlora.py", "from recipes_lib.fine_tuning.lora import apply_lora", True),
        ("fine_tuning/lora.py", "from recipes_lib.fine_tuning.qlora import apply_qlora", False),
    ],
)
def test_the_import_rule_can_fail(tmp_path, file, line, allowed):
    path = tmp_path / "recipes_lib" / file
    path.parent.mkdir(parents=True)
    path.write_text(line)
    assert (forbidden_imports(tmp_path / "recipes_lib") == []) is allowed


# --- 2. small files -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CORE + TECHNIQUES, ids=name)
def test_files_are_short(path):
    limit = 250 if path in CORE else 200
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= limit, f"{name(path)} has {lines} lines, more than {limit}"


def test_core_is_at_most_seven_files():
    assert len(CORE) <= 7, [path.name for path in CORE]


# --- 3. folders and their tables of contents ------------------------------------------------------


def test_no_folder_is_unknown_or_without_init():
    folders = {path.parent for path in EVERY_FILE} - {LIB}
    assert {folder.name for folder in folders} <= {"core", *FOLDERS}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


@pytest.mark.parametrize("init", sorted(LIB.rglob("__init__.py")), ids=name)
def test_init_is_a_table_of_contents_and_nothing_else(init):
    tree = parse(init)
    table = ast.get_docstring(tree)
    assert table and len(tree.body) == 1, "only a docstring: the import line is the address"
    contents = [path.stem for path in modules(init.parent)]
    contents += [path.parent.name for path in init.parent.glob("*/__init__.py")]
    rows = re.findall(r"^\W*(\w+)", table, re.M)
    assert [entry for entry in contents if entry not in rows] == [], "files without a line"


# --- 4. imports are cheap -------------------------------------------------------------------------


def import_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Everything outside function bodies."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from import_time_nodes(child)


@pytest.mark.parametrize("path", EVERY_FILE, ids=name)
def test_heavy_libraries_are_imported_where_they_are_used(path):
    names = []
    for node in import_time_nodes(parse(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    assert {dotted.split(".")[0] for dotted in names} & HEAVY == set()


IMPORT_EVERYTHING = """
import importlib, pkgutil, socket

def refuse(*args, **kwargs):
    raise AssertionError("an import uses the network")

socket.socket.connect = socket.getaddrinfo = refuse

import torch
import recipes_lib

for module in pkgutil.walk_packages(recipes_lib.__path__, "recipes_lib."):
    if not module.name.endswith(".__main__"):
        importlib.import_module(module.name)
        assert not torch.cuda.is_initialized(), f"{module.name} touches CUDA"
"""


def test_imports_touch_neither_cuda_nor_network():
    command = [sys.executable, "-c", IMPORT_EVERYTHING]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- 5. every technique has the same anatomy ------------------------------------------------------


def public_functions(path: Path) -> list[ast.FunctionDef]:
    functions = [node for node in parse(path).body if isinstance(node, ast.FunctionDef)]
    return [function for function in functions if not function.name.startswith("_")]


@for_each_technique
def test_docstring_has_every_section(path):
    text = ast.get_docstring(parse(path)) or ""
    missing = [word for word in SECTIONS if not re.search(rf"(^| ){word}\b", text, re.M)]
    assert missing == []


@for_each_technique
def test_verb_comes_first_and_an_estimate_exists(path):
    names = [function.name for function in public_functions(path)]
    assert any(name.startswith("estimate_") for name in names), f"no estimate_… among {names}"
    assert not names[0].startswith("estimate_"), "the technique itself comes before its estimate"


@for_each_technique
def test_public_functions_are_documented_typed_and_called_by_keyword(path):
    problems = []
    for function in public_functions(path):
        spec = function.args
        arguments = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]
        if not ast.get_docstring(function):
            problems.append(f"{function.name}: no docstring")
        if function.returns is None or any(argument.annotation is None for argument in arguments):
            problems.append(f"{function.name}: a type hint is missing")
        # (q, k, v) and (hidden, weight, labels) read well; options do not without their names.
        if spec.defaults or len(spec.posonlyargs + spec.args) > 3:
            problems.append(f"{function.name}: at most three positional arguments, no options")
    assert problems == []


# --- 6. a technique is found by its name everywhere -----------------------------------------------


@for_each_technique
def test_technique_has_its_test_and_its_row(path):
    test = ROOT / "tests" / path.parent.name / f"test_{path.stem}.py"
    assert test.exists(), f"{test.relative_to(ROOT)} is missing"
    cheatsheet = (ROOT / "CHEATSHEET.md").read_text(encoding="utf-8")
    assert f"recipes_lib/{name(path)}" in cheatsheet, "no row in CHEATSHEET.md"
