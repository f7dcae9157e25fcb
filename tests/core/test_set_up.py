"""What a notebook installs on a machine that has a PyTorch already."""

import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from recipes_lib.core import set_up


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
