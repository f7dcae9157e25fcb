"""The runtime of a device: a .pte in planned memory, on one thread, measured.

Problem    A program on a device must not ask for memory while it runs: there may be none, and the
           search takes time. What PyTorch needs from moment to moment, nobody knows in advance.
Idea       The exported program is a list of operators, so it is known when each tensor is born and
           when it is read last. Tensors that are never alive together get the same place in one
           block of memory. The largest choose first:

               offset   ┌──────────────┐
                        │ a            │┌─────┐
                        └──────┬───────┘│ c   │      time →
                        ┌──────┴──┐     └─────┘
                        │ b       │
                        └─────────┘

Saves      The block is as large as what is alive at one moment, not as the sum of all tensors. A
           call costs no allocation. Weights are read from the file where it is mapped.
Costs      Shapes cannot grow beyond what was planned. XNNPACK packs a second copy of the weights
           when it loads the file, in the order that its kernels read.
Use when   A .pte is to be checked and measured where it was made, before it goes to a device.
Not when   Numbers for another device are wanted: its processor has other kernels. Measure there.
In production   ExecuTorch's `Module` in C++, Swift and Kotlin; `executorch.runtime.Runtime`.
Source     ExecuTorch documentation, "Memory Planning"; Pisarchyk and Lee, "Efficient Memory
           Management for Deep Neural Net Inference", arXiv 2001.03288 (the largest choose first).
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from recipes_lib.edge._executorch import executorch_runtime
from recipes_lib.edge._silenced_libraries import noise_to

# --- the idea: what a learner can copy ------------------------------------------------------------


class Lifetime(NamedTuple):
    """A tensor of so many bytes, from the step that makes it to the last one that reads it."""

    bytes: int
    born: int
    last: int


def plain_plan(tensors: Sequence[Lifetime]) -> tuple[list[int], int]:
    """The memory plan of a .pte: the offset of each tensor in one block, and the block's bytes."""
    offsets = {}
    block = 0
    for index in sorted(range(len(tensors)), key=lambda index: -tensors[index].bytes):
        size, born, last = tensors[index]
        offset = 0
        for other, taken in sorted(offsets.items(), key=lambda placed: placed[1]):
            alive_together = tensors[other].born <= last and born <= tensors[other].last
            if alive_together and taken < offset + size:  # the hole before it is too small
                offset = max(offset, taken + tensors[other].bytes)
        offsets[index] = offset
        block = max(block, offset + size)
    return [offsets[index] for index in range(len(tensors))], block


# --- the technique --------------------------------------------------------------------------------


class PteModel:
    """A loaded .pte: call it with tensors of the shapes and dtypes of its export."""

    def __init__(self, method: Any, *, load_seconds: float) -> None:
        self._method = method
        self.load_seconds = load_seconds

    def __call__(self, *inputs: Tensor) -> Any:
        """One forward of the .pte: a tensor, or a tuple where the program returns several."""
        # The runtime takes the bytes of "channels last" for those of the ordinary order, without a
        # word, and the answer is wrong.
        ordered = [part.detach().contiguous() for part in inputs]
        outputs = self._method.execute(ordered)
        if len(outputs) == 1:
            return outputs[0]
        return tuple(outputs)


def load_pte(path: Path | str) -> PteModel:
    """Load a .pte into ExecuTorch's runtime, on one thread. What it prints is kept away."""
    with noise_to():
        runtime = executorch_runtime(threads=1)
        started = time.perf_counter()
        method = runtime.load_program(Path(path)).load_method("forward")
        return PteModel(method, load_seconds=time.perf_counter() - started)


def measured_peak_bytes(path: Path | str) -> int:
    """How much a fresh process grows when it loads the .pte and runs it once; Linux alone."""
    command = [sys.executable, "-c", _MEASURE, str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise ValueError(f"{path} could not be measured: {done.stderr[-300:]}")
    return int(done.stdout.split()[-1])


# VmHWM is the largest resident size so far; VmRSS the one of now.
_MEASURE = """
import sys
import torch
import executorch.kernels.quantized
from executorch.runtime import Runtime
from executorch.extension.pybindings import portable_lib

def kibibytes(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

portable_lib._unsafe_reset_threadpool(1)
runtime = Runtime.get()
before = kibibytes("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # forget the peak of the imports
method = runtime.load_program(sys.argv[1]).load_method("forward")
meta = method.metadata
infos = [meta.input_tensor_meta(number) for number in range(meta.num_inputs())]
dtypes = {6: torch.float32, 4: torch.int64}  # the numbers of ScalarType
method.execute([torch.zeros(tuple(info.sizes()), dtype=dtypes[info.dtype()]) for info in infos])
print(1024 * (kibibytes("VmHWM") - before))
"""
