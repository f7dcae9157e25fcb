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
TECHNIQUE_ROOMS = ["precision", "architecture", "attention", "memory", "training", "fine_tuning"]
TECHNIQUE_ROOMS += ["parallel", "inference", "compression", "edge"]
# From the ground up: a floor uses itself and what is below it.
FLOORS = [["core"], ["report"], TECHNIQUE_ROOMS, ["workflows"], ["cli"]]
SECTIONS = ["Problem", "Idea", "Saves", "Costs", "Use when", "Not when", "In production", "Source"]
# The one technique that is by definition a composition.
ALLOWED = {("fine_tuning.qlora", "fine_tuning.lora")}
# Slow to import or not installed everywhere: only inside the function that needs them.
HEAVY = {"bitsandbytes", "torchao", "executorch", "deepspeed", "flash_attn", "liger_kernel"}
HEAVY |= {"peft", "datasets", "mlflow", "wandb", "onnx", "onnxruntime", "onnxscript", "mlxtend"}
HEAVY |= {"torch_pruning"}

EVERY_FILE = sorted(LIB.rglob("*.py"))


def name(path: Path) -> str:
    return path.relative_to(LIB).as_posix()


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def techniques() -> list[Path]:
    """A technique is a file, or a folder whose `__init__.py` is the technique.

    A file with an underscore is what techniques of one room share.
    """
    found = []
    for room in TECHNIQUE_ROOMS:
        files = [path for path in (LIB / room).glob("*.py") if not path.name.startswith("_")]
        found += [*files, *(LIB / room).glob("*/__init__.py")]
    return sorted(found)


def technique_of(parts: list[str]) -> str:
    """("memory", "tiled_mlp", "apply_tiled_mlp") -> "memory.tiled_mlp"."""
    return ".".join(parts[:2])


TECHNIQUES = [path for path in techniques() if len(parse(path).body) > 1]  # a sign is none


# --- 1. imports go down, and never from technique to technique ------------------------------------


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


def floor(room: str) -> int:
    """The number of a room's floor; what stands beside the rooms (`__main__.py`) is the top."""
    return next((number for number, rooms in enumerate(FLOORS) if room in rooms), len(FLOORS))


def forbidden_imports(lib: Path) -> list[str]:
    """Imports that run up, and those from one technique to another."""
    found = []
    for path in sorted(lib.rglob("*.py")):
        source = [*path.relative_to(lib).with_suffix("").parts]
        for dotted in imported_names(path, lib):
            first, *target = dotted.split(".")
            if first != lib.name or not target:
                continue
            if floor(target[0]) > floor(source[0]):
                found.append(f"{'/'.join(source)} imports {dotted}, which is above it")
            if {source[0], target[0]} <= set(TECHNIQUE_ROOMS):
                pair = technique_of(source), technique_of(target)
                shared = target[0] == source[0] and target[1].startswith("_")
                if pair[0] != pair[1] and pair not in ALLOWED and not shared:
                    found.append(f"{pair[0]} imports another technique, {pair[1]}")
    return found


def test_imports_go_down():
    assert forbidden_imports(LIB) == []


@pytest.mark.parametrize(
    ("file", "line", "allowed"),
    [
        ("memory/a/__init__.py", "from recipes_lib.memory.a.cpu import kernel", True),
        ("memory/a/cpu.py", "from recipes_lib.memory.b import apply_b", False),
        ("memory/a.py", "from recipes_lib.memory._shared import tiles", True),
        ("memory/a.py", "def f():\n    from .b import apply_b", False),
        ("core/measure/a.py", "from recipes_lib.report.show import show", False),
    ],
)
def test_the_import_rule_can_fail(tmp_path, file, line, allowed):
    lib = tmp_path / "recipes_lib"
    (lib / file).parent.mkdir(parents=True, exist_ok=True)
    (lib / file).write_text(line)
    assert (forbidden_imports(lib) == []) is allowed


# --- 2. every room has a sign ---------------------------------------------------------------------


def test_every_folder_names_its_files():
    """The docstring of `__init__.py` has a line for each file and folder beside it."""
    missing = []
    for folder in sorted({path.parent for path in EVERY_FILE}):
        sign = ast.get_docstring(parse(folder / "__init__.py")) or ""
        contents = [path.stem for path in folder.glob("*.py") if not path.stem.startswith("__")]
        contents += [init.parent.name for init in folder.glob("*/__init__.py")]
        rows = re.findall(r"^\W*(\w+)", sign, re.M)
        missing += [f"{name(folder)}: {entry}" for entry in contents if entry not in rows]
    assert missing == []


# --- 3. imports are cheap -------------------------------------------------------------------------


def import_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Everything outside function bodies."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from import_time_nodes(child)


def test_heavy_libraries_are_imported_where_they_are_used():
    found = []
    for path in EVERY_FILE:
        for node in import_time_nodes(parse(path)):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            heavy = [dotted for dotted in names if dotted.split(".")[0] in HEAVY]
            found += [f"{name(path)}: {dotted}" for dotted in heavy]
    assert found == []


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


# --- 4. every technique has the same anatomy ------------------------------------------------------


def public_functions(path: Path) -> list[ast.FunctionDef]:
    functions = [node for node in parse(path).body if isinstance(node, ast.FunctionDef)]
    return [function for function in functions if not function.name.startswith("_")]


def test_a_technique_says_what_it_is_for_and_begins_with_the_idea():
    problems = []
    for path in TECHNIQUES:
        source = path.read_text(encoding="utf-8")
        text = ast.get_docstring(ast.parse(source)) or ""
        missing = [word for word in SECTIONS if not re.search(rf"(^| ){word}\b", text, re.M)]
        problems += [f"{name(path)}: {word} is missing" for word in missing]
        parts = re.findall(r"^# --- ([^:\n]+?)(?::.*)? -*$", source, re.M)
        if parts[:1] != ["the idea"]:
            problems.append(f"{name(path)}: the idea in plain lines comes first")
    assert problems == []


def test_public_functions_are_documented_and_typed():
    problems = []
    for path in EVERY_FILE:
        if path.relative_to(LIB).parts[0] not in TECHNIQUE_ROOMS:
            continue
        for function in public_functions(path):
            spec = function.args
            arguments = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]
            untyped = any(argument.annotation is None for argument in arguments)
            if not ast.get_docstring(function) or untyped or function.returns is None:
                problems.append(f"{name(path)}: {function.name}")
    assert problems == []


# --- 5. code can be read aloud --------------------------------------------------------------------

LONGEST_FUNCTION = 60  # lines, its docstring not counted: about a screen
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def holds(node: ast.AST, kinds: type | tuple[type, ...]) -> bool:
    """Whether something of these kinds stands inside `node`, itself not counted."""
    return any(isinstance(inner, kinds) for inner in ast.walk(node) if inner is not node)


def is_boolean(node: ast.AST) -> bool:
    negated = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    return negated or isinstance(node, ast.Compare | ast.BoolOp)


def knots_of(node: ast.AST) -> Iterator[str]:
    """What a reader has to untie at this node."""
    if isinstance(node, ast.IfExp) and holds(node, ast.IfExp):
        yield "a conditional inside a conditional"
    if isinstance(node, ast.Call):
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        if any(isinstance(value, ast.NamedExpr) for value in given):
            yield "a walrus inside a call"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        factors = (node.left, node.right)
        yield from ("a boolean as a factor" for factor in factors if is_boolean(factor))
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.BoolOp | ast.IfExp):
        yield "`and`, `or` or a conditional as control flow"
    if isinstance(node, ast.Tuple) and any(isinstance(part, ast.Lambda) for part in node.elts):
        yield "lambdas in a tuple"
    if isinstance(node, COMPREHENSIONS) and holds(node, COMPREHENSIONS):
        yield "a comprehension inside a comprehension"


def unreadable(source: str) -> list[str]:
    tree = ast.parse(source)
    found = []
    for node in ast.walk(tree):
        found += [f"line {node.lineno}: {knot}" for knot in knots_of(node)]
        if isinstance(node, ast.FunctionDef):
            first = node.body[0]
            if ast.get_docstring(node) and len(node.body) > 1:
                first = node.body[1]
            lines = node.end_lineno - first.lineno + 1
            if lines > LONGEST_FUNCTION:
                found.append(f"line {node.lineno}: {node.name} has {lines} lines")
    return found


def test_code_can_be_read_aloud():
    sources = [(name(path), path.read_text(encoding="utf-8")) for path in EVERY_FILE]
    assert {path: unreadable(source) for path, source in sources if unreadable(source)} == {}
