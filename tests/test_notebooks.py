"""The notebooks equal their sources, ran in order, and follow one template."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from pathlib import Path

import jupytext
import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
SOURCES = sorted((NOTEBOOKS / "source").glob("*.py"))
# What every notebook has, as a pattern that one of its headings matches.
HEADINGS = {
    "map": r"\bmap\b",
    "setup": r"\bset-?up\b",
    "baseline": r"\bbaseline\b",
    "everything combined": r"\b(everything combined|together)\b",
    "when not": r"\bwhen\b.*\bnot\b",
    "exercises": r"\bexercises\b",
    "references": r"\breferences\b",
}
LOCAL_PATH = re.compile(r"(?<![\w./-])/(home|root|work|tmp|Users)\b|\b[A-Z]:\\{1,2}[A-Z]")

pytestmark = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


@pytest.fixture
def notebook(source):
    return nbformat.read(NOTEBOOKS / f"{source.stem}.ipynb", 4)


def cells(notebook, kind):
    return [cell for cell in notebook.cells if cell.cell_type == kind]


def prose(notebook):
    return "\n".join(cell.source for cell in cells(notebook, "markdown"))


def outputs(notebook):
    return [output for cell in cells(notebook, "code") for output in cell.outputs]


def test_notebook_equals_its_source(source, notebook):
    expected = [(cell.cell_type, cell.source) for cell in jupytext.read(source).cells]
    actual = [(cell.cell_type, cell.source) for cell in notebook.cells]
    assert actual == expected, f"run: make notebooks NB={source.stem[:2]}"


def test_executed_in_order_without_errors(notebook):
    counts = [cell.execution_count for cell in cells(notebook, "code")]
    assert counts == list(range(1, len(counts) + 1))
    assert [output.ename for output in outputs(notebook) if output.output_type == "error"] == []


def test_outputs_are_free_of_warnings(notebook):
    streams = [output for output in outputs(notebook) if output.output_type == "stream"]
    errors = [stream.text for stream in streams if stream.name == "stderr"]
    assert [text for text in errors if "warn" in text.lower()] == []


def test_shows_figures(notebook):
    figures = [output for output in outputs(notebook) if "image/png" in output.get("data", {})]
    assert len(figures) >= 2


def test_shown_code_is_todays(source, notebook):
    """Functions change after a notebook ran, and its text then explains other lines."""
    execute = load_execute()
    found = [
        f"{cell.id}: {code.splitlines()[0]}"
        for cell, codes in execute.shown_code(notebook)
        for code in execute.outdated(cell, codes)
    ]
    number = source.stem[:2]
    assert found == [], f"run: python notebooks/execute.py prose {number} (or build {number})"


def test_older_code_is_found_and_refreshed(source, notebook):
    """In the form of today, without running anything; a printed one has to run again."""
    execute = load_execute()
    cell, codes = execute.shown_code(notebook)[0]
    older = execute.show.in_markdown("def older(): ...")
    cell.outputs = [nbformat.v4.new_output("display_data", dict(older)) for _ in codes]
    assert execute.outdated(cell, codes) == codes
    execute.refresh_shown(cell, codes, source)
    assert execute.outdated(cell, codes) == []
    cell.outputs = [nbformat.v4.new_output("stream", text="def older(): ...")]
    with pytest.raises(SystemExit, match="has to run again"):
        execute.refresh_shown(cell, codes, source)


def test_titles_of_steps_are_no_code(notebook):
    """The terminal of `make run` shows them."""
    cells = notebook.cells
    code = [index for index, cell in enumerate(cells) if cell.cell_type == "code"]
    titles = [load_execute().title(cells, index) for index in code]
    assert all(titles)
    assert [title for title in titles if re.match(r"(from \w+ |import )|.*[=(]$", title)] == []


def test_every_call_of_show_is_found(source, notebook):
    """The mistake: a call that the search does not see is never compared."""
    calls = sum(len(re.findall(r"^\s*show\(", cell.source, re.M)) for cell in notebook.cells)
    assert sum(len(codes) for _, codes in load_execute().shown_code(notebook)) == calls > 0


@functools.cache
def load_execute():
    """notebooks/execute.py, which belongs to no package."""
    spec = importlib.util.spec_from_file_location("execute", NOTEBOOKS / "execute.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_headings_follow_the_template(notebook):
    headings = [
        re.sub(r"[*_]", "", line).lower()
        for line in prose(notebook).splitlines()
        if line.startswith("#")
    ]
    assert notebook.cells[0].source.startswith("# "), "the first cell is the title"
    assert [h for h in headings if h.startswith("# ")] == headings[:1], "one title"
    absent = [
        what
        for what, pattern in HEADINGS.items()
        if not any(re.search(pattern, heading) for heading in headings)
    ]
    assert absent == []


def test_colab_badge_opens_this_notebook(source, notebook):
    first = notebook.cells[0].source + notebook.cells[1].source
    assert "colab-badge.svg" in first
    target = r"colab\.research\.google\.com/github/[\w.-]+/[\w.-]+/blob/main/notebooks/([\w.-]+)"
    assert re.findall(target, first) == [f"{source.stem}.ipynb"]


def test_nothing_names_the_machine(source, notebook):
    texts = [
        source.read_text(encoding="utf-8"),
        *map(load_execute().output_text, outputs(notebook)),
    ]
    assert [match.group() for text in texts for match in LOCAL_PATH.finditer(text)] == []


def test_links_into_the_repository_resolve(notebook):
    links = re.findall(r"\]\(([^)#\s]+)", prose(notebook))
    relative = [NOTEBOOKS / link for link in links if "://" not in link]
    ours = re.compile(r"https://github\.com/[\w.-]+/llm-training-recipes/(?:blob|tree)/main/(.+)")
    absolute = [ROOT / match[1] for link in links if (match := ours.match(link))]
    assert [str(path) for path in relative + absolute if not path.exists()] == []


def test_imports_from_the_package_exist(source):
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("recipes_lib"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                submodule = (
                    importlib.util.find_spec(f"{node.module}.{alias.name}")
                    if hasattr(module, "__path__")
                    else None
                )
                assert submodule or hasattr(module, alias.name), (
                    f"{node.module} has no {alias.name}"
                )
