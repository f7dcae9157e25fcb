"""Whether torch.compile can make kernels here, before a training or a decoder counts on it."""

from __future__ import annotations

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
