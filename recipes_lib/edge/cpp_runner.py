"""The .pte in C++: a program of some fifty lines, built with what the wheel of ExecuTorch brings.

Problem    The app on the device is no Python. Does the file run there, with the same numbers, and
           how much memory does it take without Python around it?
Idea       A tensor is its bytes. Python writes the input's to a file, the program reads them, runs
           the model, and writes the output's:

               input.bin  →  run_pte model.pte  →  output.bin

           `cpp/main.cpp` is the program, `cpp/CMakeLists.txt` says what it is linked with: the
           runtime, its kernels, and XNNPACK, all of them libraries in the wheel.
Saves      Nothing by itself. It measures what Python hides: the memory of the whole process.
Costs      A compiler for C++20 and cmake 3.28 or newer; seconds for the build.
Use when   Before a model goes into an app, and for latency without Python's part in it.
Not when   A program with operators of its own, such as custom attention: their kernels are in
           libraries that need PyTorch. The language model of this folder has them.
In production   The same `Module` in an app: `executorch` for Swift and for Android (Maven), or
           ExecuTorch built from source with the kernels that the model needs and no others.
Source     ExecuTorch documentation, "Using ExecuTorch with C++" and "Module Extension".
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from recipes_lib.core.measure.machine import require

SOURCES = Path(__file__).parent / "cpp"
OLDEST_CMAKE = (3, 28)  # older ones find the package, and none of its targets

# --- the idea: what a learner can copy ------------------------------------------------------------


def plain_write(tensor: Tensor, path: Path) -> None:
    """For the C++ program: the numbers of `tensor` as they lie in memory, 4 bytes each."""
    path.write_bytes(tensor.detach().contiguous().numpy().tobytes())


def plain_read(path: Path) -> Tensor:
    """The C++ program's file as a flat tensor: nothing in it tells the shape."""
    return torch.from_numpy(numpy.fromfile(path, dtype=numpy.float32))


# --- the technique --------------------------------------------------------------------------------


@dataclass(frozen=True)
class CppRun:
    """What the program said: its output as a flat fp32 tensor, its times, its memory."""

    output: Tensor
    load_seconds: float
    seconds_per_call: float
    peak_bytes: int


def build_runner(folder: Path | str) -> Path:
    """Build the C++ program in `folder`, and return its path."""
    executorch = require("executorch")
    cmake = find_cmake()
    package = Path(next(iter(executorch.__path__)))
    configure = [cmake, "-S", SOURCES, "-B", folder, "-DCMAKE_BUILD_TYPE=Release"]
    _run_program([*configure, f"-DCMAKE_PREFIX_PATH={package}"])
    _run_program([cmake, "--build", folder])
    return Path(folder) / "run_pte"


def run_in_cpp(runner: Path | str, pte: Path | str, x: Tensor, *, calls: int = 20) -> CppRun:
    """Run a .pte with one fp32 input and one fp32 output in C++, on one thread."""
    if x.dtype is not torch.float32:
        raise ValueError(f"x is stored in {x.dtype}: give x.float()")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "input.bin"
        target = Path(folder) / "output.bin"
        plain_write(x, source)
        said = _run_program([runner, pte, source, target, calls])
        output = plain_read(target)
    load, call, kibibytes = (float(word) for word in said.split())
    return CppRun(output, load / 1000, call / 1000, int(kibibytes) * 1024)


def find_cmake() -> str:
    """The cmake beside this Python, or that of the system.

    An old one configures without an error, and then misses every library.
    """
    beside = str(Path(sys.executable).parent)
    cmake = shutil.which("cmake", path=os.pathsep.join([beside, os.environ["PATH"]]))
    said = "no cmake"
    if cmake is not None:
        said = _run_program([cmake, "--version"])
    found = re.search(r"version (\d+)\.(\d+)", said)
    if found is None or tuple(map(int, found.groups())) < OLDEST_CMAKE:
        raise ValueError(
            f"there is {said.splitlines()[0]}: version 3.28 or newer is needed, run "
            f"`pip install cmake`"
        )
    return cmake


def _run_program(command: list[Any]) -> str:
    """What cmake or the C++ program prints; ValueError if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip()[-500:]
        raise ValueError(f"{' '.join(words)} ends with exit status {done.returncode}: {said}")
    return done.stdout
