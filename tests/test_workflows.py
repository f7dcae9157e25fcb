"""What GitHub runs, when, and on whose machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".github" / "workflows"


def load(name: str) -> dict:
    workflow = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    workflow["on"] = workflow.pop(True)  # YAML 1.1 reads the word "on" as true
    return workflow


def commands(job: dict) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def test_the_gpu_workflow_never_runs_a_strangers_code():
    """The mistake: a pull request from a fork starts on a machine that somebody owns."""
    assert load("gpu.yml")["on"].keys() == {"workflow_dispatch", "schedule"}


def test_one_variable_names_the_gpu_runner():
    """Without it, it is one's own machine, and nothing waits there every week for a runner."""
    (job,) = load("gpu.yml")["jobs"].values()
    assert job["runs-on"] == "${{ vars.GPU_RUNNER || 'gpu' }}"
    assert job["if"] == "${{ github.event_name == 'workflow_dispatch' || vars.GPU_RUNNER != '' }}"


def test_the_gpu_workflow_says_first_what_it_runs_on():
    """A slow result is of no use if nobody knows the driver and the cuDNN that made it."""
    (job,) = load("gpu.yml")["jobs"].values()
    first, *others = commands(job)
    for word in ("name,driver_version", "cudnn.version()"):
        assert word in first
    assert others[0] == "make gpu"


def test_ci_runs_on_pull_requests_what_everyone_can_run():
    workflow = load("ci.yml")
    assert "pull_request" in workflow["on"]
    for job in workflow["jobs"].values():
        assert job["runs-on"] == "ubuntu-latest"
        assert commands(job) == [".ci/run"]
    assert "exec make test" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yml")), ids=lambda path: path.name)
def test_no_workflow_may_write(path):
    assert load(path.name)["permissions"] == {"contents": "read"}
