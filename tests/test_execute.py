"""`make run` and its relatives: a run that fails takes nothing away."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def execute(monkeypatch, tmp_path):
    """notebooks/execute.py with a notebook of one cell, and with an earlier run in its folder."""
    spec = importlib.util.spec_from_file_location("execute", ROOT / "notebooks" / "execute.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "RUNS", tmp_path / "runs")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "09_mine.ipynb").write_text("earlier")
    (tmp_path / "09_mine.py").write_text("# %%\n1 + 1\n")
    return module


@pytest.mark.parametrize("stopped_by", ["the reader", "a cell"])
def test_a_run_that_fails_keeps_the_earlier_one(execute, monkeypatch, tmp_path, stopped_by):
    """The mistake: hours of numbers are overwritten by the first cell of a run that is stopped."""
    error = KeyboardInterrupt()
    if stopped_by == "a cell":
        error = execute.CellExecutionError("", "NameError", "x")

    def fail_after_a_cell(nb, path):
        execute.save(nb, path)
        raise error

    monkeypatch.setattr(execute, "run_cells", fail_after_a_cell)
    assert execute.execute(tmp_path / "09_mine.py")[1] != 0
    assert (tmp_path / "runs" / "09_mine.ipynb").read_text() == "earlier"
    assert "1 + 1" in (tmp_path / "runs" / "09_mine.unfinished.ipynb").read_text()


def test_a_whole_run_replaces_the_earlier_one(execute, monkeypatch, tmp_path):
    monkeypatch.setattr(execute, "run_cells", execute.save)
    assert execute.execute(tmp_path / "09_mine.py")[1] == 0
    assert "1 + 1" in (tmp_path / "runs" / "09_mine.ipynb").read_text()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["09_mine.ipynb"]


def test_shown_code_is_refreshed_where_that_is_possible(execute, tmp_path):
    """The mistake: `prose` keeps older lines of a function, or puts new ones into printed text."""
    source = tmp_path / "10_shows.py"
    source.write_text(
        "# %%\nfrom recipes_lib.report.charts import figure\n\nshow(figure.new_figure)\n"
    )
    ((cell, codes),) = execute.shown_code(execute.build(source))
    older = execute.show.in_markdown("def older(): ...")
    cell.outputs = [execute.nbformat.v4.new_output("display_data", dict(older))]
    assert execute.outdated(cell, codes) == codes
    execute.refresh_shown(cell, codes, source)
    assert execute.outdated(cell, codes) == []
    cell.outputs = [execute.nbformat.v4.new_output("stream", text="def older(): ...")]
    with pytest.raises(SystemExit, match="has to run again"):
        execute.refresh_shown(cell, codes, source)


@pytest.mark.parametrize(
    ("arguments", "narrowed"), [("tests/test_execute.py::test_a_whole_run", True), ("-x", False)]
)
def test_a_path_in_args_narrows_the_tests(arguments, narrowed):
    """The mistake: `make test ARGS=path` runs that path beside everything else, for an hour."""
    command = ["make", "--dry-run", "READY=pyproject.toml", "test", f"ARGS={arguments}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    line = next(line for line in done.stdout.splitlines() if "pytest" in line)
    assert line.endswith(arguments)
    assert ("notebooks" not in line.split()) == narrowed
