"""What GitHub runs, when, and on whose machine."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".github" / "workflows"


def load(name: str) -> dict:
    workflow = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    workflow["on"] = workflow.pop(True)  # YAML 1.1 reads the word "on" as true
    return workflow


def test_the_gpu_workflow_never_runs_a_strangers_code():
    """The mistake: a pull request from a fork starts on a machine that somebody owns."""
    assert load("gpu.yml")["on"].keys() == {"workflow_dispatch", "schedule"}


def test_without_a_runner_nothing_waits_for_one():
    """The mistake: each week a job waits for a machine that nobody has registered."""
    (job,) = load("gpu.yml")["jobs"].values()
    assert job["if"] == "${{ github.event_name == 'workflow_dispatch' || vars.GPU_RUNNER != '' }}"


def test_no_workflow_may_write():
    """The mistake: an action of somebody else gets a token that can push."""
    for path in FOLDER.glob("*.yml"):
        assert load(path.name)["permissions"] == {"contents": "read"}, path.name


def test_one_floor_of_python_everywhere():
    """The mistake: 3.10 is promised, and a library that is required cannot be installed on it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    floor = project["requires-python"].removeprefix(">=")
    for file in ("README.md", "Makefile", "docs/install.md"):
        promised = re.findall(r"(3\.\d+) or newer", (ROOT / file).read_text())
        assert set(promised) == {floor}, file
    checks = (ROOT / "Makefile").read_text()
    assert f"sys.version_info < ({floor.replace('.', ', ')})" in checks
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    [matrix] = re.findall(r"python: \[(.+)\]", workflow)
    assert matrix.split(", ")[0] == f'"{floor}"'
