"""`make lab`: a reader works on copies, and no copy is lost."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tools import lab

ROOT = Path(__file__).resolve().parents[2]
NAME = "01_test.ipynb"


def write(path, source, *, output="committed"):
    path.parent.mkdir(parents=True, exist_ok=True)
    cell = {"cell_type": "code", "source": [source], "outputs": [{"text": output}]}
    path.write_text(json.dumps({"cells": [cell]}))


def shown(path):
    """The text of the only cell and what it has shown."""
    (cell,) = json.loads(path.read_text())["cells"]
    return "".join(cell["source"]), cell["outputs"][0]["text"]


@pytest.fixture
def project(tmp_path):
    write(tmp_path / "notebooks" / NAME, "1 + 1")
    return tmp_path


def test_a_copy_is_made_once_and_the_original_stays(project):
    original = (project / "notebooks" / NAME).read_bytes()
    assert lab.make_copies(project) == [f"lab/{NAME} is a copy of notebooks/{NAME}."]
    assert (project / "lab" / NAME).read_bytes() == original
    write(project / "lab" / NAME, "2 + 2", output="the reader's")
    assert lab.make_copies(project) == [], "the second time there is no news"
    assert shown(project / "lab" / NAME) == ("2 + 2", "the reader's")
    assert (project / "notebooks" / NAME).read_bytes() == original


def test_a_changed_copy_survives_a_newer_notebook(project):
    """The mistake: `git pull` and `make lab` throw away what a reader has written."""
    lab.make_copies(project)
    write(project / "lab" / NAME, "1 + 1", output="the reader's")
    write(project / "notebooks" / NAME, "1 + 1 + 1")
    (news,) = lab.make_copies(project)
    assert "is yours and stays" in news
    assert shown(project / "lab" / NAME) == ("1 + 1", "the reader's")
    (project / "lab" / NAME).rename(project / "lab" / "mine.ipynb")
    lab.make_copies(project)
    assert shown(project / "lab" / NAME) == ("1 + 1 + 1", "committed")
    assert shown(project / "lab" / "mine.ipynb") == ("1 + 1", "the reader's")


def test_an_untouched_copy_follows_the_notebook(project):
    lab.make_copies(project)
    write(project / "notebooks" / NAME, "1 + 1 + 1")
    lab.make_copies(project)
    assert shown(project / "lab" / NAME) == ("1 + 1 + 1", "committed")


@pytest.mark.parametrize(
    ("cells", "opens"), [("1 + 1", "this machine's"), ("of older cells", "committed")]
)
def test_what_make_run_has_executed_here_is_what_opens(project, cells, opens):
    """Unless it comes from other cells than today's."""
    write(project / "runs" / NAME, cells, output="this machine's")
    lab.make_copies(project)
    assert shown(project / "lab" / NAME) == ("1 + 1", opens)


def test_links_of_the_notebooks_work_in_their_copies():
    """The mistake: copies in a deeper folder, whose ../recipes_lib is nowhere."""
    broken = []
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        for kind, source in lab.cells(notebook):
            if kind == "markdown":
                for link in re.findall(r"\]\(([^)#\s]+)", source):
                    target = Path(os.path.normpath(ROOT / "lab" / link))
                    if "://" not in link and not target.exists():
                        broken.append(f"{notebook.name}: {link}")
    assert broken == []
