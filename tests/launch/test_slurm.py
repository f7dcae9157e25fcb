"""launch/slurm: directives that SLURM reads, and jobs that run on two nodes where it is installed.

apt install slurmctld slurmd
pytest tests/launch/test_slurm.py
"""

import re

import pytest

from tests.launch.one_process import OPTIONS, losses_alone
from tests.launch.scripts import LAUNCH, losses_in, run
from tests.launch.slurm_cluster import available, slurm_cluster

pytestmark = pytest.mark.survey
FILES = sorted((LAUNCH / "slurm").glob("*.sbatch"))
STARTING = [path for path in FILES if path.stem != "nccl_tests"]  # those that start torchrun
needs_slurm = pytest.mark.skipif(not available(), reason="needs slurmctld and slurmd")
# What a directive of ours may say: the options of `sbatch --help`, and the form of their values.
DIRECTIVES = {
    "job-name": r"[a-z-]+",
    "nodes": r"\d+",
    "ntasks-per-node": r"\d+",
    "gpus-per-node": r"\d+",
    "cpus-per-task": r"\d+",
    "mem": r"\d+[KMGT]?",
    "exclusive": "",
    "time": r"\d\d:\d\d:\d\d",
    "output": r"[%\w-]+\.log",
    "open-mode": "append|truncate",
}


def directives(text):
    """Name and value of each, up to the first command: SLURM does not read those behind it."""
    found = {}
    for line in text.splitlines():
        if line.startswith("#SBATCH"):
            name, _, value = line.removeprefix("#SBATCH --").partition("=")
            found[name] = value
        elif line and not line.startswith("#"):
            return found
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_slurm_reads_every_directive(path):
    text = path.read_text(encoding="utf-8")
    found = directives(text)
    assert len(found) == text.count("\n#SBATCH"), "one stands behind the first command"
    for name, value in found.items():
        assert re.fullmatch(DIRECTIVES[name], value), name


@pytest.mark.parametrize("path", STARTING, ids=lambda path: path.stem)
def test_one_task_on_each_machine_gets_all_its_cores(path):
    """torchrun starts the ranks; more tasks would be as many torchruns."""
    text = path.read_text(encoding="utf-8")
    assert directives(text)["ntasks-per-node"] == "1"
    assert 'srun --cpus-per-task="$SLURM_CPUS_PER_TASK"' in text
    assert 'cd "$SLURM_SUBMIT_DIR"' in text


@pytest.fixture(scope="module")
def cluster():
    with slurm_cluster() as variables:
        yield variables


@needs_slurm
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_slurm_would_start_it(cluster, path):
    code, printed = run(["sbatch", "--test-only", path], **cluster)
    assert code == 0, printed
    assert "to start at" in printed


@needs_slurm
@pytest.mark.parametrize("path", STARTING, ids=lambda path: path.stem)
def test_the_job_trains(cluster, path, tmp_path):
    """Two nodes with a rank each, or one with two."""
    ranks = "2" if path.stem == "one_node" else "1"
    words = ["--steps", "2", *OPTIONS]
    if path.stem != "accelerate_many_nodes":
        words += ["--device", "cpu", "--strategy", "fsdp"]
    variables = {"RANKS": ranks, "HEAD": "localhost", "ADDRESS": "127.0.0.1"}
    variables |= {"CONFIG": "launch/accelerate/ddp.yaml", "ACCELERATE_USE_CPU": "true"}
    log = tmp_path / "job.log"
    command = ["sbatch", "--wait", f"--output={log}", path, *words]
    code, printed = run(command, **variables, **cluster)
    assert code == 0, printed + log.read_text(encoding="utf-8")
    # The file of accelerate computes in bf16.
    tolerance = 1e-2 if path.stem == "accelerate_many_nodes" else 1e-5
    losses = losses_in(log.read_text(encoding="utf-8"))
    assert losses == pytest.approx(losses_alone(2), abs=tolerance)
