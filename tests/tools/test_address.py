"""The repository has one address, and one command changes it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tools.address import change_address, present_address

ROOT = Path(__file__).resolve().parents[2]
NEW = "ada-lovelace/recipes_2.0"


def repository_files() -> list[Path]:
    """What belongs to the repository: known to git, or new and not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


@pytest.fixture(scope="module")
def files():
    try:
        return repository_files()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a checkout of git")


@pytest.fixture
def copy(tmp_path, files):
    """The repository as it is, somewhere else."""
    for path in files:
        target = tmp_path / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return tmp_path


def test_a_new_address_replaces_the_old_one_and_nothing_else(copy, files):
    """The mistakes: a place that the command does not know, and a file that it damages."""
    old = present_address(ROOT)
    changed = change_address(copy, NEW)
    assert present_address(copy) == NEW
    assert copy / "README.md" in changed
    for path in files:
        before = path.read_bytes()
        after = (copy / path.relative_to(ROOT)).read_bytes()
        assert old.encode() not in after, path
        assert after == before.replace(old.encode(), NEW.encode()), path


def test_a_longer_name_is_another_repository(tmp_path):
    """The mistake: a link to owner/name-data becomes one to a repository that does not exist."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    link = f"https://github.com/{present_address(ROOT)}"
    readme = tmp_path / "README.md"
    readme.write_text(f"{link}-data {link}.")
    change_address(tmp_path, NEW)
    assert readme.read_text() == f"{link}-data https://github.com/{NEW}."


def test_no_other_address_of_this_repository(files):
    """The mistake: a link that somebody wrote with an address of before."""
    name = "llm-training-recipes"
    here = re.compile(
        rf"github\.com/([\w-]+/{name})\b"
        r"|colab\.research\.google\.com/github/([\w-]+/[\w.-]+?)/blob"
        r"|git clone [^\n]*github\.com/([\w-]+/[\w.-]*\w)"
    )
    others = []
    for path in files:
        if path.suffix in (".md", ".py", ".ipynb", ".toml", ".yml", ".svg", ".html", ""):
            for found in here.finditer(path.read_text(encoding="utf-8")):
                address = "".join(part or "" for part in found.groups())
                if address != present_address(ROOT):
                    others.append(f"{path.relative_to(ROOT)}: {address}")
    assert others == []


@pytest.mark.parametrize(
    "address",
    ["recipes", "ada/re cipes", "https://github.com/ada/recipes", "a/b.git"],
)
def test_what_is_no_address_changes_nothing(tmp_path, address):
    settings = shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with pytest.raises(ValueError, match="give the owner and the name"):
        change_address(tmp_path, address)
    assert Path(settings).read_bytes() == (ROOT / "pyproject.toml").read_bytes()
