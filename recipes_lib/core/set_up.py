"""Install what a notebook needs beside the PyTorch that is there, and leave that one as it is.

    install(code, extra="notebooks")

pip takes the newest PyTorch if the installed one is too old for this package. On a hosted machine
that is a trap: the newest build wants a newer driver than the machine has. It installs, sees no
GPU, runs on the CPU, and the torchvision beside it no longer fits. So the installed version is a
constraint for pip, and one that is too old gets a sentence. Nothing here imports PyTorch: after an
import the kernel would have to be restarted.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

OLDEST_TORCH = (2, 9)  # as pyproject.toml says


def install(code: Path, *, extra: str) -> None:
    """Install the package in the folder `code` with its `extra`, and what they need.

    PyTorch, imported after it, is quiet about memory that ran out and was found again.

    Raises ValueError for a PyTorch that is older than the package needs, and RuntimeError if pip
    fails.
    """
    # PyTorch reads it when it is imported. Else it prints a line for each time that a GPU's memory
    # runs out, also where a recipe goes on with less.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    constraints = torch_as_it_is()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "constraints.txt"
        file.write_text("\n".join(constraints), encoding="utf-8")
        command = [sys.executable, "-m", "pip", "install", "-q", "-e", f"{code}[{extra}]"]
        done = subprocess.run([*command, "-c", str(file)], check=False)
    if done.returncode != 0:
        raise RuntimeError(
            f"pip could not install {code}[{extra}] beside {', '.join(constraints) or 'no torch'}: "
            f"its output says why; docs/install.md shows other ways"
        )


def torch_as_it_is() -> list[str]:
    """The installed PyTorch as a constraint for pip; none if there is none.

    Raises ValueError for one that is too old.
    """
    try:
        installed = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return []
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    if numbers and (int(numbers[1]), int(numbers[2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ValueError(
            f"torch {installed} is installed, and this package needs {oldest} or newer: install "
            f"one that fits the driver of this machine (pytorch.org/get-started), restart the "
            f"kernel, and run this cell again"
        )
    return [f"torch=={installed}"]
