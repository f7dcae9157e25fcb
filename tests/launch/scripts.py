"""What the tests of `launch/` share: its scripts as modules, and commands that run them."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
# The same launchers; their ranks import nothing anew, see there.
FORKED = [sys.executable, str(ROOT / "tests" / "launch" / "forked_ranks.py"), "-m"]
FORKED_TORCHRUN = [*FORKED, "torch.distributed.run"]
FORKED_ACCELERATE = [*FORKED, "accelerate.commands.launch"]
SECONDS = 180  # a start that takes longer hangs


def load(name):
    """A script of `launch/` as a module: they import each other as scripts of one folder do."""
    sys.path.insert(0, str(LAUNCH))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(LAUNCH))


def environment(**more):
    """That of this process, without what a launcher around it has set."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_")
    own = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return own | {"OMP_NUM_THREADS": "1", "RECIPES_TIER": "cpu", "PYTHON": sys.executable} | more


def run(command, **variables):
    """Run a command from the root. Returns its exit code and all that it printed."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    return done.returncode, done.stdout


def losses_in(printed):
    """The losses of lines such as `step    3   loss 4.807048   7,287 tokens/s`."""
    lines = [line.split() for line in printed.splitlines() if line.startswith("step ")]
    return [float(words[3]) for words in lines]
