"""Whether torch.compile can make kernels here, and how many graphs it may make of a function."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch


def require_compiler(device: torch.device) -> None:
    """Raise ValueError if torch.compile has nothing to compile kernels with."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise ValueError(
                "torch.compile needs Triton to compile for this GPU: `pip install triton`, on a "
                "card of compute capability 7.0 or newer; or go on uncompiled"
            )
    elif device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except (InvalidCxxCompiler, RuntimeError) as error:
            raise ValueError(
                "torch.compile needs a C++ compiler on a CPU and finds none: install one (`apt "
                "install g++`) or name it in the variable CXX; or go on uncompiled"
            ) from error


def compile_apart(
    function: Callable[..., Any], *, most_graphs: int | None = None, **options: Any
) -> Callable[..., Any]:
    """`torch.compile` with a count of graphs of its own, up to `most_graphs` or PyTorch's limit.

    PyTorch counts the graphs of a piece of code, for all functions that were made from it.
    """
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        own = {"recompile_limit": most_graphs, "isolate_recompiles": True}
        return torch.compile(function, **own, **options)
    # An older PyTorch: a copy of the code has a count of its own, and the limit is a setting.
    copy = types.FunctionType(
        function.__code__.replace(), function.__globals__, closure=function.__closure__
    )
    compiled = torch.compile(copy, **options)
    if most_graphs is None:
        return compiled

    def limited(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=most_graphs):
            return compiled(*args, **kwargs)

    return limited
