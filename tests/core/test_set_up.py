"""What a notebook installs on a machine that has a PyTorch already."""

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


def test_an_old_torch_gets_a_sentence(monkeypatch, pip):
    installed(monkeypatch, "2.8.0+cu126")
    with pytest.raises(ValueError, match=r"torch 2\.8\.0\+cu126 .* 2\.9 or newer.*restart"):
        set_up.install(Path("/code"), extra="notebooks")
    assert pip == []


def test_the_oldest_torch_is_that_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = ".".join(map(str, set_up.OLDEST_TORCH))
    assert f"torch>={oldest}" in project["dependencies"]
