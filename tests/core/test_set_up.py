"""What a notebook installs on a machine that has a PyTorch already."""

import os
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from recipes_lib.core import set_up

ROOT = Path(__file__).parents[2]


@pytest.fixture
def pip(monkeypatch):
    """What pip is asked for: the arguments, and the lines of the constraints."""
    asked = []

    def run(command, **options):
        constraints = Path(command[command.index("-c") + 1]).read_text()
        asked.append((command, constraints.split()))
        return subprocess.CompletedProcess(command, returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    return asked


def installed(monkeypatch, version):
    def version_of(name):
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", version_of)


@pytest.mark.parametrize(
    ("version", "constraints"),
    [("2.9.0+cu126", ["torch==2.9.0+cu126"]), ("2.13.0", ["torch==2.13.0"]), (None, [])],
)
def test_the_installed_torch_stays(monkeypatch, pip, version, constraints):
    """The mistake: on Colab pip brings a build for a newer driver, and the GPU is gone."""
    installed(monkeypatch, version)
    set_up.install(Path("/code"), extra="notebooks")
    ((command, given),) = pip
    assert "/code[notebooks]" in command
    assert given == constraints


def test_memory_that_is_found_again_is_no_line_for_the_reader(monkeypatch, pip):
    """The mistake: each attempt of a search that runs out prints two lines of C++."""
    installed(monkeypatch, "2.13.0")
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "to be removed")
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL")
    set_up.install(Path("/code"), extra="notebooks")
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "ERROR"
    assert "export TORCH_CPP_LOG_LEVEL ?= ERROR" in (ROOT / "Makefile").read_text()


def test_an_old_torch_gets_a_sentence(monkeypatch, pip):
    installed(monkeypatch, "2.8.0+cu126")
    with pytest.raises(ValueError, match=r"torch 2\.8\.0\+cu126 .* 2\.9 or newer.*restart"):
        set_up.install(Path("/code"), extra="notebooks")
    assert pip == []


def test_a_failure_of_pip_is_named(monkeypatch):
    installed(monkeypatch, "2.9.0")
    failed = subprocess.CompletedProcess([], returncode=1)
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: failed)
    with pytest.raises(RuntimeError, match=r"beside torch==2\.9\.0"):
        set_up.install(Path("/code"), extra="notebooks")


def test_the_oldest_torch_is_that_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = ".".join(map(str, set_up.OLDEST_TORCH))
    assert f"torch>={oldest}" in project["dependencies"]


def test_notebooks_install_like_this():
    for source in (ROOT / "notebooks/source").glob("0*.py"):
        text = source.read_text(encoding="utf-8")
        assert '"pip", "install"' not in text and "    install(code, extra=" in text, source
