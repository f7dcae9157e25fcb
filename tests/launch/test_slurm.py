"""launch/slurm: one task for each machine."""

import pytest

from tests.launch.scripts import LAUNCH

STARTING = ["accelerate_many_nodes", "many_nodes", "one_node"]  # those that start torchrun


@pytest.mark.parametrize("name", STARTING)
def test_one_task_on_each_machine_gets_all_its_cores(name):
    """torchrun starts the ranks; more tasks would be as many torchruns.

    SLURM reads no directive behind the first command.
    """
    text = (LAUNCH / "slurm" / f"{name}.sbatch").read_text(encoding="utf-8")
    directives, _, commands = text.partition("\nset -euo pipefail")
    assert "#SBATCH --ntasks-per-node=1\n" in directives
    assert "#SBATCH" not in commands
    assert 'srun --cpus-per-task="$SLURM_CPUS_PER_TASK"' in commands
    assert 'cd "$SLURM_SUBMIT_DIR"' in commands
