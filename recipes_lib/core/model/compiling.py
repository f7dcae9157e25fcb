"""Whether torch.compile can make kernels here, before a training or a decoder counts on it."""

from __future__ import annotations

from collections.abc import Iterable

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


def require_kernels_for(device: torch.device, dtypes: Iterable[torch.dtype]) -> None:
    """Raise ValueError for bf16 on a card that has none.

    PyTorch emulates bf16 there and compiles nothing: it warns, and runs the module as it is.
    """
    if device.type != "cuda" or torch.bfloat16 not in dtypes:
        return
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise ValueError(
            f"a GPU of compute capability {major}.{minor} has no bf16, and PyTorch compiles none "
            f"for it: take torch.float16 or fp32, or go on uncompiled"
        )
