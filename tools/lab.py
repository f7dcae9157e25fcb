"""Copies of the notebooks in lab/, for a reader to run and to change.

    make lab

The notebooks of the project stay as they are, so `git status` is silent and `git pull` works. A
copy that the reader has run or changed is never overwritten. lab/ lies as deep in the repository
as notebooks/: links from a notebook to the package work in the copy, too.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

# What each copy was when it was made: {name: {"project": digest, "copy": digest}}.
NOTES = ".copies.json"


def make_copies(root: Path) -> list[str]:
    """Bring lab/ up to date; gives one line for each notebook about which there is news."""
    lab = root / "lab"
    lab.mkdir(exist_ok=True)
    notes = read_notes(lab)
    news = []
    for original in sorted((root / "notebooks").glob("*.ipynb")):
        copy = lab / original.name
        note = notes.get(original.name, {})
        is_current = note.get("project") == digest(original)
        if copy.exists() and is_current:
            continue
        if copy.exists() and note.get("copy") != digest(copy):
            news.append(
                f"lab/{copy.name} is yours and stays as it is. The project's notebook is another "
                f"one by now: rename your copy, and the next `make lab` makes a new one."
            )
            continue
        source = newest_version(original, executed=root / "runs" / original.name)
        shutil.copyfile(source, copy)
        notes[original.name] = {"project": digest(original), "copy": digest(copy)}
        news.append(f"lab/{copy.name} is a copy of {source.relative_to(root).as_posix()}.")
    (lab / NOTES).write_text(json.dumps(notes, indent=1), encoding="utf-8")
    return news


def read_notes(lab: Path) -> dict[str, dict[str, str]]:
    """What was noted when the copies were made; nothing at the first time."""
    path = lab / NOTES
    if not path.exists():
        return {}
    return json.loads(path.read_text(encoding="utf-8"))


def newest_version(original: Path, *, executed: Path) -> Path:
    """`executed`, with this machine's numbers, if `make run` made it from the same cells."""
    if executed.exists() and cells(executed) == cells(original):
        return executed
    return original


def cells(notebook: Path) -> list[tuple[str, str]]:
    """Kind and text of every cell, without what it has shown."""
    content: dict[str, Any] = json.loads(notebook.read_text(encoding="utf-8"))
    return [(cell["cell_type"], "".join(cell["source"])) for cell in content["cells"]]


def digest(path: Path) -> str:
    """A fingerprint of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    for line in make_copies(ROOT):
        print(line)
