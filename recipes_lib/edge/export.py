"""Export to ExecuTorch: a model as one file that runs without Python and without PyTorch.

Problem    A phone or a camera has no Python, and no room for PyTorch. The model is Python code.
Idea       Run the model once, and write down each operator with its inputs and its output. This
           list is a program: whoever has the operators can run it. Neighbours on the list that a
           library of fast kernels (a backend) knows are handed over to it as one call:

               conv → batch norm → relu6 → conv → add → avg_pool2d → linear
               └────────── XNNPACK, one call ───────┘   outside     └ XNNPACK ┘

Saves      Python and PyTorch on the device. The backend folds batch norms into convolutions, fuses
           activations, and packs the weights in advance.
Costs      Seconds to minutes for the lowering. The shapes of the example are fixed, and so is each
           decision that Python took on the way. What the backend does not know runs on portable
           kernels, which are plain loops: `require_delegated` says so in place of a slow program.
Use when   The model is to run in an app, on a phone, a Raspberry Pi or a microcontroller.
Not when   A server with Python is there: `torch.compile`. Other runtimes are given: `onnx_export`.
In production   `executorch` with its partitioners: XNNPACK (CPUs), Core ML, Qualcomm, Vulkan, Arm
           Ethos; optimum-executorch for models of the hub.
Source     ExecuTorch documentation, "Export and Lowering" and "XNNPACK Backend",
           https://docs.pytorch.org/executorch; Dukhan, XNNPACK, https://github.com/google/XNNPACK.

ExecuTorch is optional: `pip install executorch`. What it prints is kept away.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from recipes_lib.core.measure.machine import require
from recipes_lib.edge._delegated_operators import read_delegation, require_delegated
from recipes_lib.edge._exported_file import ExportedFile, whole_or_none
from recipes_lib.edge._graph import capture_graph, sparing_the_collector
from recipes_lib.edge._silenced_libraries import noise_to

# --- the idea: what a learner can copy ------------------------------------------------------------


class PlainRecorder(TorchDispatchMode):
    """A list of the operators that run inside of its block: `program`."""

    def __init__(self) -> None:
        super().__init__()
        self.program = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        result = operator(*args, **options)
        self.program.append((operator, args, options, result))
        return result


def plain_replay(program: list[tuple], recorded: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
    """Run the exported `program` on another input; `recorded` are its own input and output."""
    old_input, old_output = recorded
    now = {id(old_input): x}  # the tensor that stands where a recorded one stood

    def replaced(value: Any) -> Any:
        return now.get(id(value), value)  # a weight stays itself

    for operator, args, options, result in program:
        new = operator(*tree_map(replaced, args), **tree_map(replaced, options))
        for before, after in zip(tree_leaves(result), tree_leaves(new)):
            now[id(before)] = after
    return now[id(old_output)]


# --- the technique --------------------------------------------------------------------------------


def export_to_executorch(
    model: nn.Module,
    example: tuple[Tensor, ...],
    *,
    path: Path | str,
    delegate: bool = True,
) -> ExportedFile:
    """Write `model` as a .pte file. The model stays as it is.

    A Hugging Face model becomes a program that returns its logits. The result's `delegation` says
    which operators the backend has taken. Light ones that it does not know, such as a group norm or
    an upsampling, run outside of it: `delegation.outside()` names them.

    Args:
        model: in fp32 on a CPU, or a graph that `quantize_pt2e` made.
        example: the inputs of one call. The program takes inputs of these shapes, and no others.
        path: of the file, such as "model.pte". Its folder is made where it does not exist.
        delegate: hand over to XNNPACK what it knows. False: everything runs on portable kernels.
    """
    path = Path(path)
    started = time.perf_counter()
    with noise_to():
        require("executorch")
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

        with sparing_the_collector():
            graph = capture_graph(model, example)
            backends = [XnnpackPartitioner()] if delegate else None
            lowered = to_edge_transform_and_lower(graph, partitioner=backends)
            delegation = read_delegation(lowered.exported_program().graph_module)
            if delegate:
                require_delegated(delegation)
            program = lowered.to_executorch()  # each tensor gets its place in one block of memory
        with whole_or_none(path) as unfinished, unfinished.open("wb") as file:
            program.write_to_file(file)
    seconds = time.perf_counter() - started
    return ExportedFile(path, path.stat().st_size, seconds, delegation)
