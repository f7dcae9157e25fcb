"""launch/*.sh: the shell reads them, and torchrun starts the ranks that they ask for."""

import os
import shlex
import socket
import subprocess

import pytest

from tests.launch.one_process import OPTIONS, losses_alone
from tests.launch.scripts import FORKED, LAUNCH, ROOT, SECONDS, environment, losses_in, run

FILES = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("slurm/*.sbatch")])
ON_CPU = ["--device", "cpu", *OPTIONS]


def test_the_shell_reads_every_file():
    """The mistakes: a bracket that is missing; a failed command after which the script goes on."""
    for path in FILES:
        code, printed = run(["bash", "-n", path])
        assert code == 0, printed
        assert "set -euo pipefail" in path.read_text(encoding="utf-8"), path.name
        assert path.suffix != ".sh" or os.access(path, os.X_OK), path.name


def program(path, line):
    """A program that stands in the place of Python."""
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return str(path)


def test_one_machine(tmp_path):
    """How torchrun is called: the test of two agents starts it."""
    says = program(tmp_path / "python", 'echo "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE $*"')
    command = [LAUNCH / "torchrun_one_node.sh", "--strategy", "ddp"]
    code, printed = run(command, PYTHON=says, RANKS="2", RESTARTS="1")
    assert code == 0, printed
    expected = "1 -m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 1"
    assert printed.strip() == f"{expected} launch/train.py --strategy ddp"


def test_two_agents_are_two_machines(tmp_path):
    """They meet at a port of this machine, and only the first one prints."""
    forks = program(tmp_path / "python", f'exec {shlex.join(FORKED[:-1])} "$@"')
    meeting = {"HEAD": "localhost", "NODES": "2", "JOB": "test", "ADDRESS": "127.0.0.1"}
    meeting |= {"PORT": str(free_port()), "RANKS": "1", "PYTHON": forks}
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
