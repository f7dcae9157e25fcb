"""launch/slurm: directives that SLURM reads, one task for each machine."""

import re

from tests.launch.scripts import LAUNCH

FILES = sorted((LAUNCH / "slurm").glob("*.sbatch"))
STARTING = [path for path in FILES if path.stem != "nccl_tests"]  # those that start torchrun
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


def test_slurm_reads_every_directive():
    """The mistakes: a name that it does not know, a directive behind the first command."""
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        found = directives(text)
        assert len(found) == text.count("\n#SBATCH"), path.name
        for name, value in found.items():
            assert re.fullmatch(DIRECTIVES[name], value), f"{path.name}: {name}"


def test_one_task_on_each_machine_gets_all_its_cores():
    """torchrun starts the ranks; more tasks would be as many torchruns."""
    for path in STARTING:
        text = path.read_text(encoding="utf-8")
        assert directives(text)["ntasks-per-node"] == "1", path.name
        assert 'srun --cpus-per-task="$SLURM_CPUS_PER_TASK"' in text, path.name
        assert 'cd "$SLURM_SUBMIT_DIR"' in text, path.name
