"""Install what a notebook needs beside the PyTorch that is there, and leave that one as it is.

    install(code, extra="notebooks")

pip takes the newest PyTorch if the installed one is too old for this package. On a hosted machine
that is a trap: the newest build wants a newer driver than the machine has. It installs, sees no
GPU, runs on the CPU, and the torchvision beside it no longer fits. So the installed version is a
constraint for pip, which refuses one that is too old. Nothing here imports PyTorch: after an import
the kernel would have to be restarted.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path


def install(code: Path, *, extra: str) -> None:
    """Install the package in the folder `code` with its `extra`, and what they need.

    PyTorch, imported after it, is quiet about memory that ran out and was found again.
    """
    # PyTorch reads it when it is imported. Else it prints a line for each time that a GPU's memory
    # runs out, also where a recipe goes on with less.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "constraints.txt"
        file.touch()
        with contextlib.suppress(metadata.PackageNotFoundError):
            file.write_text(f"torch=={metadata.version('torch')}")
        command = [sys.executable, "-m", "pip", "install", "-q", "-e", f"{code}[{extra}]"]
        subprocess.run([*command, "-c", str(file)], check=True)
