"""What the README and its companions promise is there: commands run, paths and links resolve."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README, CHEATSHEET, CONTRIBUTING = (
    ROOT / f"{name}.md" for name in ("README", "CHEATSHEET", "CONTRIBUTING")
)
# Made by commands, not part of the repository.
GENERATED = ("runs/", ".venv/")
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def commands(path: Path) -> list[list[str]]:
    """The words of every command in the fenced shell blocks, without comments."""
    blocks = re.findall(r"^```(?:bash|sh|shell|console)\n(.*?)^```", text(path), re.S | re.M)
    lines = "\n".join(blocks).replace("\\\n", " ").replace("&&", "\n").splitlines()
    words = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]
    return [line for line in words if line]


MAKE = [line for line in commands(README) if line[0] == "make"]
PYTHON_M = [
    line
    for line in commands(README) + commands(CHEATSHEET)
    if Path(line[0]).name in ("python", "python3") and line[1:3] == ["-m", "recipes_lib"]
]


def test_readme_shows_the_main_commands():
    assert {"run", "test", "lab", "gpu"} <= {word for line in MAKE for word in line[1:]}
    assert PYTHON_M, "no python -m recipes_lib …"


@pytest.mark.parametrize("line", MAKE, ids=" ".join)
def test_make_targets_exist(line):
    dry = [line[0], "--dry-run", *line[1:]]
    done = subprocess.run(dry, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("line", PYTHON_M, ids=" ".join)
def test_command_line_examples_run(line, tmp_path):
    done = subprocess.run(
        [sys.executable, *(word.replace("runs/", f"{tmp_path}/") for word in line[1:])],
        cwd=ROOT,
        env=ENVIRONMENT | {"RECIPES_FAST": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def repository_files() -> list[Path]:
    top = [path for path in ROOT.iterdir() if path.name not in (".git", ".venv", "runs")]
    return top + [below for path in top if path.is_dir() for below in path.rglob("*")]


def test_paths_in_the_readme_exist():
    inside = re.compile(r"^[\w.-]+(/[\w.-]+)*/?$")
    tokens = {token for token in re.findall(r"`([^`\n]+)`", text(README)) if inside.match(token)}
    paths = {
        token
        for token in tokens
        if token.endswith((".py", ".md", ".ipynb", ".txt", ".toml", ".yml", "/"))
        or (ROOT / token.split("/")[0]).is_dir()
    }
    # A file map may give a path below its folder's heading, so the end of a path is enough.
    known = [f"/{path.relative_to(ROOT).as_posix()}" for path in repository_files()]
    missing = [
        token
        for token in paths
        if not token.startswith(GENERATED)
        and not any(path.endswith("/" + token.rstrip("/")) for path in known)
    ]
    assert missing == []


def anchors(path: Path) -> set[str]:
    """GitHub's anchors of the headings: lower case, no punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ +(.+)$", text(path), re.M)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.strip()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("path", [README, CHEATSHEET, CONTRIBUTING], ids=lambda path: path.name)
def test_links_resolve(path):
    assert path.exists()
    broken = []
    for link in re.findall(r"\]\(<?([^)>\s]+)", text(path)):
        if re.match(r"\w+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in anchors(target)
        ):
            broken.append(link)
    assert broken == []


def test_file_map_lists_every_technique():
    folders = [path for path in (ROOT / "recipes_lib").glob("*/") if path.name != "core"]
    files = [path.name for folder in folders for path in folder.glob("[!_]*.py")]
    absent = [file for file in files if not re.search(rf"\b{re.escape(file)}", text(README))]
    assert absent == []
