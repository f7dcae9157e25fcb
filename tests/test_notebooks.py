"""The notebooks are their sources, and ran as a whole.

Each test looks at all notebooks, and lists what is wrong in any of them.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib.util
import re
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
SOURCES = sorted((NOTEBOOKS / "source").glob("*.py"))
BADGE = r"colab\.research\.google\.com/github/[\w.-]+/[\w.-]+/blob/main/notebooks/([\w.-]+)"
OURS = r"https://github\.com/[\w.-]+/llm-training-recipes/(?:blob|tree)/main/"
LOCAL_PATH = re.compile(r"(?<![\w./-])/(home|root|work|tmp|Users)\b|\b[A-Z]:\\{1,2}[A-Z]")


@functools.cache
def load_execute():
    """notebooks/execute.py, which belongs to no package."""
    spec = importlib.util.spec_from_file_location("execute", NOTEBOOKS / "execute.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def built():
    """Each notebook as its source says, without outputs."""
    return {source.stem: load_execute().build(source) for source in SOURCES}


@functools.cache
def executed():
    """Each notebook of the repository, with its outputs."""
    paths = [NOTEBOOKS / f"{source.stem}.ipynb" for source in SOURCES]
    return {path.stem: nbformat.read(path, 4) for path in paths}


def of_kind(notebook, kind):
    return [cell for cell in notebook.cells if cell.cell_type == kind]


def prose(notebook):
    return "\n".join(cell.source for cell in of_kind(notebook, "markdown"))


def test_notebooks_are_their_sources():
    """The mistake: a text or a function changes, and a notebook explains other lines."""
    execute = load_execute()
    stale = []
    for (name, expected), actual in zip(built().items(), executed().values()):
        number = name[:2]
        cells = [[(cell.cell_type, cell.source) for cell in nb.cells] for nb in (expected, actual)]
        if cells[0] != cells[1]:
            stale.append(f"make notebooks NB={number}")
        for cell, codes in execute.shown_code(actual):
            for code in execute.outdated(cell, codes):
                line = code.splitlines()[0]
                stale.append(f"python notebooks/execute.py prose {number}: {cell.id}, {line}")
    assert stale == []


def test_outputs_come_from_one_whole_run():
    """The mistakes: cells ran out of order, or printed an error, a warning or a local path."""
    wrong = []
    for name, notebook in executed().items():
        code = of_kind(notebook, "code")
        if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
            wrong.append(f"{name}: not run in order")
        outputs = [output for cell in code for output in cell.outputs]
        wrong += [f"{name}: {each.ename}" for each in outputs if each.output_type == "error"]
        for output in outputs:
            text = load_execute().output_text(output)
            if output.get("name") == "stderr" and "warn" in text.lower():
                wrong.append(f"{name}: {text}")
            wrong += [f"{name}: {found.group()}" for found in LOCAL_PATH.finditer(text)]
        if sum("image/png" in output.get("data", {}) for output in outputs) < 2:
            wrong.append(f"{name}: fewer than two figures")
    assert wrong == []


def test_sources_open_in_colab_and_show_todays_code():
    """The mistakes: a badge that opens another notebook, a call of show() that nothing compares."""
    wrong = []
    for name, notebook in built().items():
        if re.findall(BADGE, prose(notebook)) != [f"{name}.ipynb"]:
            wrong.append(f"{name}: no badge that opens it")
        for index, cell in enumerate(notebook.cells):
            title = load_execute().title(notebook.cells, index)
            is_code = re.match(r"(from \w+ |import )|.*[=(]$", title)
            if cell.cell_type == "code" and (not title or is_code):
                wrong.append(f"{name}: the terminal shows {title!r} as the title of {cell.id}")
        calls = sum(len(re.findall(r"^\s*show\(", cell.source, re.M)) for cell in notebook.cells)
        if sum(len(codes) for _, codes in load_execute().shown_code(notebook)) != calls:
            wrong.append(f"{name}: a call of show() that the comparison with today's code misses")
    assert wrong == []


def test_links_of_sources_lead_somewhere():
    """The mistake: a file moves, and a link stays as it was."""
    wrong = []
    for (name, notebook), source in zip(built().items(), SOURCES):
        for link in re.findall(r"\]\(([^)#\s]+)", prose(notebook)):
            here = re.sub(OURS, "../", link)
            if "://" not in here and not (NOTEBOOKS / here).exists():
                wrong.append(f"{name}: {link}")
        text = source.read_text(encoding="utf-8")
        wrong += [f"{name}: {found.group()}" for found in LOCAL_PATH.finditer(text)]
    assert wrong == []


def test_the_cell_to_take_home_needs_nothing_else_of_its_page():
    """The mistake: lines to copy that ask for a name of an earlier cell."""
    cells = of_kind(built()["01_large_models_limited_hardware"], "code")
    tree = ast.parse(next(cell.source for cell in cells if "SFTTrainer(" in cell.source))
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    stored = {name.id for name in names if not isinstance(name.ctx, ast.Load)}
    stored |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    stored |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            stored |= {alias.asname or alias.name for alias in node.names}
    asked = {name.id for name in names} - stored - set(dir(builtins))
    assert asked == {"source", "half"}
