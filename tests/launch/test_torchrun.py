"""launch/*.sh: the shell reads them, and torchrun starts the ranks that they ask for."""

import os
import shutil
import socket
import subprocess

import pytest

from tests.launch.one_process import OPTIONS, losses_alone
from tests.launch.scripts import LAUNCH, ROOT, SECONDS, environment, losses_in, run

FILES = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("slurm/*.sbatch")])
ON_CPU = ["--device", "cpu", *OPTIONS]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_shell_reads_it(path):
    code, printed = run(["bash", "-n", path])
    assert code == 0, printed
    assert "set -euo pipefail" in path.read_text(encoding="utf-8")
    if path.suffix == ".sh":
        assert os.access(path, os.X_OK)
    if shutil.which("shellcheck"):
        code, printed = run(["shellcheck", path])
        assert code == 0, printed


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "--standalone --nproc-per-node gpu --max-restarts 0"),
        ({"RANKS": "2", "RESTARTS": "1"}, "--standalone --nproc-per-node 2 --max-restarts 1"),
    ],
    ids=str,
)
def test_one_machine(tmp_path, variables, expected):
    """How torchrun is called, by a program in its place: the test of two agents starts it."""
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE $*"\n')
    program.chmod(0o755)
    words = ["--strategy", "ddp", "--steps", "2"]
    command = [LAUNCH / "torchrun_one_node.sh", *words]
    code, printed = run(command, PYTHON=str(program), **variables)
    assert code == 0, printed
    torchrun = f"1 -m torch.distributed.run {expected}"
    assert printed.strip() == f"{torchrun} launch/train.py --strategy ddp --steps 2"


def test_two_agents_are_two_machines():
    """They meet at a port of this machine, and only the first one prints."""
    meeting = {"HEAD": "localhost", "NODES": "2", "JOB": "test", "ADDRESS": "127.0.0.1"}
    meeting |= {"PORT": str(free_port()), "RANKS": "1"}
    words = ["--strategy", "fsdp", "--steps", "2", "--ranks", "2", *ON_CPU]
    agents = []
    try:
        for _ in range(2):
            agents.append(start([LAUNCH / "torchrun_many_nodes.sh", *words], meeting))
        printed = [agent.communicate(timeout=SECONDS)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], printed
    losses = [losses_in(lines) for lines in printed]
    assert sorted(losses) == [[], pytest.approx(losses_alone(2), abs=1e-5)]


def start(command, variables):
    return subprocess.Popen(
        [str(word) for word in command],
        cwd=ROOT,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
