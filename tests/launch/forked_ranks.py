"""A launcher whose ranks are copies of itself, which spares each of them seconds of imports.

    python tests/launch/forked_ranks.py -m torch.distributed.run --standalone ... script.py ...
    python tests/launch/forked_ranks.py -m accelerate.commands.launch ... script.py ...

The words are those of Python: the launcher reads its options itself, and its agent watches the
ranks and starts them again. Only the last step differs. Where the agent would start a new Python,
it forks, and the copy runs the script from the top, as Python does.
"""

import importlib
import runpy
import sys
from pathlib import Path

import torch.distributed.run
from torch.distributed.launcher.api import elastic_launch


def import_what_scripts_import():
    """Nothing of ours: a script has to find that by itself."""
    for name in ("accelerate", "torch.distributed.checkpoint", "torch.distributed.fsdp"):
        importlib.import_module(name)
    importlib.import_module("transformers.models.llama.modeling_llama")


def launch_copies(config, entrypoint):
    """In place of `elastic_launch`, which gets the path of Python as its entry point."""
    assert entrypoint == sys.executable
    config.start_method = "fork"
    return elastic_launch(config, run_script)


def run_script(*words):
    """In a copy: what Python does with these words."""
    assert words[0] == "-u", "the option that the launcher gives to Python"
    sys.argv = list(words[1:])
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


def main():
    """Start the launcher that the command line names."""
    _, option, name, *words = sys.argv
    assert option == "-m"
    import_what_scripts_import()
    torch.distributed.run.elastic_launch = launch_copies
    launcher = importlib.import_module(name)
    sys.argv = [name, *words]
    launcher.main()


if __name__ == "__main__":
    main()
