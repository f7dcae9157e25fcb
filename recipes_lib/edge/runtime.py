"""The runtime of a device: a .pte in planned memory, on a given number of threads, measured.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recipes_lib.core.checks import check_existing_file, check_whole
from recipes_lib.core.measure.machine import require
from recipes_lib.core.model.linears import require_module
from recipes_lib.edge._executorch_threads import use_threads
from recipes_lib.edge._graph_capture import check_example, explained, in_eval_mode
from recipes_lib.edge._noise import noise_to

# ExecuTorch's numbers for dtypes; others are left to its own check.
SCALAR_TYPES = {0: torch.uint8, 3: torch.int32, 4: torch.int64, 6: torch.float32, 11: torch.bool}

# --- the idea: what a learner can copy ------------------------------------------------------------


@dataclass(frozen=True)
class Lifetime:
    """A tensor of so many bytes, from the step that makes it to the last one that reads it."""

    bytes: int
    born: int
    last: int


def plain_plan(tensors: Sequence[Lifetime]) -> tuple[list[int], int]:
    """The offset of each tensor in one block, and the bytes of the block."""
    offsets = [0] * len(tensors)
    placed = []
    for index in sorted(range(len(tensors)), key=lambda index: -tensors[index].bytes):
        tensor = tensors[index]
        others = [i for i in placed if _alive_together(tensors[i], tensor)]
        offset = 0
        for other in sorted(others, key=lambda other: offsets[other]):
            if offset + tensor.bytes <= offsets[other]:
                break  # it fits into the hole before this one
            offset = max(offset, offsets[other] + tensors[other].bytes)
        offsets[index] = offset
        placed.append(index)
    block = max((offsets[i] + tensors[i].bytes for i in placed), default=0)
    return offsets, block


def _alive_together(one: Lifetime, other: Lifetime) -> bool:
    return one.born <= other.last and other.born <= one.last


# --- the technique --------------------------------------------------------------------------------


class PteModel:
    """A loaded .pte: call it with tensors of the shapes of its export.

    `load_seconds` is the time from the file to a program that can run, libraries not counted.
    """

    def __init__(self, method: Any, *, path: Path, threads: int, load_seconds: float) -> None:
        self._method = method
        self.path = path
        self.threads = threads
        self.load_seconds = load_seconds
        meta = method.metadata
        inputs = [meta.input_tensor_meta(number) for number in range(meta.num_inputs())]
        self.input_shapes = tuple(tuple(info.sizes()) for info in inputs)
        self._dtypes = tuple(SCALAR_TYPES.get(info.dtype()) for info in inputs)

    def __call__(self, *inputs: Tensor) -> Any:
        """One forward: a tensor, or a tuple where the program returns several.

        Raises ValueError for another number of inputs, other shapes and other dtypes than those of
        the export.
        """
        self._check(inputs)
        # The runtime takes the bytes of "channels last" for those of the ordinary order, without a
        # word, and the answer is wrong.
        ordered = [part.detach().contiguous() for part in inputs]
        try:
            outputs = self._method.execute(ordered)
        except RuntimeError as error:
            raise ValueError(
                f"{self.path.name} does not run on {_sizes(inputs)}: give inputs of the shapes "
                f"{_shown(self.input_shapes)} and the dtypes of the export ({explained(error)})"
            ) from error
        if len(outputs) == 1:
            return outputs[0]
        return tuple(outputs)

    def _check(self, inputs: tuple[Tensor, ...]) -> None:
        for part in inputs:
            if not isinstance(part, Tensor):
                raise ValueError(f"{type(part).__name__} is no tensor: give tensors")
        if tuple(tuple(part.shape) for part in inputs) != self.input_shapes:
            raise ValueError(
                f"{self.path.name} takes {_shown(self.input_shapes)}, not {_sizes(inputs)}: give "
                f"inputs of these shapes, or export with another example"
            )
        for number, (part, dtype) in enumerate(zip(inputs, self._dtypes)):
            if dtype is not None and part.dtype is not dtype:
                raise ValueError(
                    f"input {number} is stored in {part.dtype}, and {self.path.name} takes "
                    f"{dtype}: give numbers as the model has seen them in training, in {dtype}"
                )


def load_pte(path: Path | str, *, threads: int = 1) -> PteModel:
    """Load a .pte into ExecuTorch's runtime. What the runtime prints is kept away.

    Args:
        threads: of the runtime, for all files of this process. The first file decides, and another
            number is refused afterwards: it would crash the files that are loaded. These threads
            are the runtime's own: `torch.set_num_threads` and `OMP_NUM_THREADS` do not change them.
    Raises ValueError for a file that does not exist or is no program, for operators without a
    kernel, for a number of threads below 1, and for another number than an earlier file has. Raises
    ImportError without ExecuTorch.
    """
    path = _existing(path, threads=threads)
    with noise_to():
        runtime = _runtime(threads)
        started = time.perf_counter()
        try:
            method = runtime.load_program(path).load_method("forward")
        except Exception as error:
            raise ValueError(
                f"{path.name} cannot be loaded: give a .pte with a method `forward`, whose "
                f"operators this runtime has ({explained(error)})"
            ) from error
        seconds = time.perf_counter() - started
        return PteModel(method, path=path, threads=threads, load_seconds=seconds)


def measured_peak_bytes(path: Path | str, *, threads: int = 1) -> int:
    """How much a fresh process grows when it loads the .pte and runs it once; Linux alone.

    The libraries are loaded before the count begins. It takes some seconds, for the process has to
    import them, and it may have another number of threads than this one. Raises ValueError for a
    file that does not exist or cannot be run, and for a number of threads below 1.
    """
    path = _existing(path, threads=threads)
    command = [sys.executable, "-c", _MEASURE, str(path), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()[-1:]  # of a traceback, the error itself
        raise ValueError(
            f"{path.name} could not be measured: give a .pte of export_to_executorch "
            f"({' '.join(said)})"
        )
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

if portable_lib._threadpool_get_thread_count() != int(sys.argv[2]):
    portable_lib._unsafe_reset_threadpool(int(sys.argv[2]))
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


# --- guards ---------------------------------------------------------------------------------------


def _existing(path: Path | str, *, threads: int) -> Path:
    check_whole(threads=threads)
    check_existing_file(made_by="export_to_executorch", path=path)
    return Path(path)


def _runtime(threads: int) -> Any:
    require("executorch")
    import executorch.kernels.quantized  # noqa: F401 - registers kernels for whole numbers
    from executorch.runtime import Runtime

    use_threads(threads)
    return Runtime.get()


def _sizes(inputs: Sequence[Tensor]) -> str:
    return _shown([tuple(part.shape) for part in inputs])


def _shown(shapes: Sequence[tuple[int, ...]]) -> str:
    if not shapes:
        return "no input"
    return ", ".join(str(list(shape)) for shape in shapes)


# --- the arithmetic -------------------------------------------------------------------------------


def predicted_arena_bytes(model: nn.Module, example: tuple[Tensor, ...]) -> int:
    """Bytes of one block for all tensors of a forward, when each operator runs by itself.

    ExecuTorch plans such a block for a program of portable kernels. XNNPACK plans one of its own
    for each subgraph, in which fused operators leave no tensors between them. Raises ValueError for
    what is no module, and for an example that is no tuple of tensors.
    """
    return plain_plan(tensor_lifetimes(model, example))[1]


def tensor_lifetimes(model: nn.Module, example: tuple[Tensor, ...]) -> list[Lifetime]:
    """When each tensor of one forward in eval mode is made and read last; weights not counted.

    Two views of the same numbers are one tensor. Raises ValueError as `predicted_arena_bytes`.
    """
    require_module(model)
    example = check_example(example)
    weights = [*model.parameters(), *model.buffers()]
    record = _Lifetimes(weights)
    with in_eval_mode(model), torch.no_grad(), record:
        record.see(example)
        output = model(*example)
        record.step += 1
        record.see(output)  # the caller reads it after the last operator
    return [Lifetime(*entry) for entry in record.seen.values()]


class _Lifetimes(TorchDispatchMode):
    """Notes for each storage [bytes, first step, last step]; keeps all alive, so no two are one."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        self.step = 0
        self.seen = {}
        self._known = {weight.untyped_storage()._cdata for weight in weights}
        self._alive = []

    def see(self, values: Any) -> None:
        """Every tensor in `values` is used at this step."""
        for value in tree_leaves(values):
            if not isinstance(value, Tensor):
                continue
            storage = value.untyped_storage()
            if storage._cdata in self._known:
                continue
            self._alive.append(storage)
            entry = self.seen.setdefault(storage._cdata, [storage.nbytes(), self.step, self.step])
            entry[2] = self.step

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        self.step += 1
        self.see((args, result))
        return result
