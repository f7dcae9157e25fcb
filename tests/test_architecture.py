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
PARTS = ["the idea", "the technique", "Hugging Face glue and guards", "the arithmetic"]
GUARDS_ALONE = "guards"  # what the third part is called where it has nothing of Hugging Face
# The one technique that is by definition a composition.
ALLOWED = {("fine_tuning/qlora.py", "fine_tuning/lora.py")}
# Slow to import or not installed everywhere: only inside the function that needs them.
HEAVY = {"bitsandbytes", "torchao", "executorch", "deepspeed", "flash_attn", "liger_kernel"}
HEAVY |= {"peft", "datasets", "mlflow", "wandb", "onnx", "onnxruntime", "onnxscript", "mlxtend"}
HEAVY |= {"torch_pruning"}


def modules(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")


def name(path: Path) -> str:
    return path.relative_to(LIB).as_posix()


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def owner(path: Path) -> Path:
    """The technique of a file: `block_sparse_cpu.py` is a part of `block_sparse.py`."""
    shorter = [other for other in modules(path.parent) if path.stem.startswith(f"{other.stem}_")]
    return min(shorter, key=lambda other: len(other.stem), default=path)


EVERY_FILE = sorted(LIB.rglob("*.py"))
TECHNIQUE_FILES = [path for room in TECHNIQUE_ROOMS for path in modules(LIB / room)]
TECHNIQUES = [path for path in TECHNIQUE_FILES if owner(path) == path]
for_each_technique = pytest.mark.parametrize("path", TECHNIQUES, ids=name)


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
        source = path.relative_to(lib)
        for dotted in imported_names(path, lib):
            parts = dotted.split(".")
            if parts[0] != lib.name or len(parts) < 2:
                continue
            if floor(parts[1]) > floor(source.parts[0]):
                found.append(f"{source.as_posix()} imports {dotted}, which is above it")
            if {source.parts[0], parts[1]} <= set(TECHNIQUE_ROOMS):
                found += between_techniques(path, lib, parts)
    return found


def between_techniques(path: Path, lib: Path, parts: list[str]) -> list[str]:
    target = lib.joinpath(*parts[1:3]).with_suffix(".py")
    if not target.exists():
        target = lib.joinpath(parts[1], "__init__.py")
    if owner(path) == owner(target):
        return []
    pair = (path.relative_to(lib).as_posix(), target.relative_to(lib).as_posix())
    return [] if pair in ALLOWED else [f"{pair[0]} imports another technique, {pair[1]}"]


def test_imports_go_down():
    assert forbidden_imports(LIB) == []


@pytest.mark.parametrize(
    ("file", "line", "allowed"),
    [
        ("memory/a.py", "from recipes_lib.core.measure import measure", True),
        ("memory/a.py", "from recipes_lib.report.show import show", True),
        ("memory/a.py", "import torch", True),
        ("memory/a.py", "from ..core import measure", True),
        ("memory/a.py", "from recipes_lib.memory.a_cpu import kernel", True),
        ("memory/a_cpu.py", "from recipes_lib.memory.b import apply_b", False),
        ("memory/b.py", "from recipes_lib.memory.a_cpu import kernel", False),
        ("memory/a.py", "from recipes_lib.training.c import apply_c", False),
        ("memory/a.py", "import recipes_lib.training.c", False),
        ("memory/a.py", "from .b import apply_b", False),
        ("memory/a.py", "def f():\n    from recipes_lib.memory import b", False),
        ("memory/a.py", "from recipes_lib.workflows.longest import search", False),
        ("core/measure.py", "from recipes_lib.memory.a import apply_a", False),
        ("core/measure.py", "from recipes_lib.report.show import show", False),
        ("report/charts.py", "from recipes_lib.workflows.longest import Search", False),
        ("workflows/longest.py", "from recipes_lib.cli.app import app", False),
        ("workflows/finetune/loop.py", "from recipes_lib.memory.a import apply_a", True),
        ("__main__.py", "from recipes_lib.cli.app import main", True),
        ("fine_tuning/qlora.py", "from recipes_lib.fine_tuning.lora import apply_lora", True),
        ("fine_tuning/lora.py", "from recipes_lib.fine_tuning.qlora import apply_qlora", False),
    ],
)
def test_the_import_rule_can_fail(tmp_path, file, line, allowed):
    lib = tmp_path / "recipes_lib"
    others = ["memory/a.py", "memory/a_cpu.py", "memory/b.py", "training/c.py"]
    others += ["fine_tuning/lora.py", "fine_tuning/qlora.py", file]
    for other in others:
        path = lib / other
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (lib / file).write_text(line)
    assert (forbidden_imports(lib) == []) is allowed


# --- 2. folders and their tables of contents ------------------------------------------------------


def test_no_room_is_unknown_or_without_init():
    rooms = {path.relative_to(LIB).parts[0] for path in EVERY_FILE if path.parent != LIB}
    assert rooms <= {room for rooms in FLOORS for room in rooms}
    folders = {path.parent for path in EVERY_FILE}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


@pytest.mark.parametrize("init", sorted(LIB.rglob("__init__.py")), ids=name)
def test_init_is_a_table_of_contents_and_nothing_else(init):
    tree = parse(init)
    table = ast.get_docstring(tree)
    assert table and len(tree.body) == 1, "only a docstring: the import line is the address"
    contents = [path.stem for path in modules(init.parent) if path.stem != "__main__"]
    contents += [path.parent.name for path in init.parent.glob("*/__init__.py")]
    rows = re.findall(r"^\W*(\w+)", table, re.M)
    assert [entry for entry in contents if entry not in rows] == [], "files without a line"


# --- 3. imports are cheap -------------------------------------------------------------------------


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


# --- 4. every technique has the same anatomy ------------------------------------------------------


def public_functions(path: Path) -> list[ast.FunctionDef]:
    functions = [node for node in parse(path).body if isinstance(node, ast.FunctionDef)]
    return [function for function in functions if not function.name.startswith("_")]


def marked_parts(source: str) -> list[str]:
    """The parts of a technique file, as its comment lines `# --- name: remark ---` mark them."""
    return [match.strip() for match in re.findall(r"^# --- ([^:\n]+?)(?::.*)? -*$", source, re.M)]


@for_each_technique
def test_docstring_has_every_section(path):
    text = ast.get_docstring(parse(path)) or ""
    missing = [word for word in SECTIONS if not re.search(rf"(^| ){word}\b", text, re.M)]
    assert missing == []


@for_each_technique
def test_parts_are_marked_and_the_idea_comes_first(path):
    parts = marked_parts(path.read_text(encoding="utf-8"))
    parts = [PARTS[2] if part == GUARDS_ALONE else part for part in parts]
    known = [PARTS.index(part) for part in parts if part in PARTS]
    assert parts[:1] == PARTS[:1], "the idea in plain lines comes first"
    assert known == sorted(set(known)), f"{parts}: each part once, in the order of {PARTS}"
    assert PARTS.index("the technique") in known


@for_each_technique
def test_arithmetic_is_an_estimate_or_a_prediction(path):
    """An estimate follows the protocol; what predicts something else than a budget is named so."""
    files = [other for other in modules(path.parent) if owner(other) == path]
    functions = [function for file in files for function in public_functions(file)]
    predictions = [f for f in functions if f.name.startswith(("estimate_", "predicted_"))]
    assert predictions, "neither estimate_… nor predicted_…"
    for function in predictions:
        if function.name.startswith("estimate_"):
            arguments = [argument.arg for argument in function.args.args]
            assert arguments == ["budget", "model", "shape"], function.name
            decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
            assert any(text.startswith("estimate(Order.") for text in decorators), function.name


@pytest.mark.parametrize("path", TECHNIQUE_FILES, ids=name)
def test_public_functions_are_documented_typed_and_called_by_keyword(path):
    problems = []
    for function in public_functions(path):
        spec = function.args
        arguments = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]
        if not ast.get_docstring(function):
            problems.append(f"{function.name}: no docstring")
        if function.returns is None or any(argument.annotation is None for argument in arguments):
            problems.append(f"{function.name}: a type hint is missing")
        # (q, k, v) and (x, weight, A, B) read well as in a formula; options do not.
        if owner(path) == path and (spec.defaults or len(spec.posonlyargs + spec.args) > 5):
            problems.append(f"{function.name}: options are given by name, and few things are not")
    assert problems == []


# --- 5. a technique is found by its name everywhere -----------------------------------------------


@for_each_technique
def test_technique_has_its_test_and_its_row(path):
    test = ROOT / "tests" / path.parent.name / f"test_{path.stem}.py"
    assert test.exists(), f"{test.relative_to(ROOT)} is missing"
    cheatsheet = (ROOT / "CHEATSHEET.md").read_text(encoding="utf-8")
    assert f"recipes_lib/{name(path)}" in cheatsheet, "no row in CHEATSHEET.md"


# --- 6. code can be read aloud --------------------------------------------------------------------

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


@pytest.mark.parametrize("path", EVERY_FILE, ids=name)
def test_code_can_be_read_aloud(path):
    assert unreadable(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "line",
    [
        "x = 1 if a else 2 if b else 3",
        "f(y := 3)",
        "x = width * (a == b)",
        "ready or start()",
        "def f():\n    return 1, lambda: 2",
        "x = [[b for b in a] for a in c]",
        "def f():\n" + "    x = 1\n" * (LONGEST_FUNCTION + 1),
    ],
)
def test_the_rules_of_reading_can_fail(line):
    assert len(unreadable(line)) == 1
