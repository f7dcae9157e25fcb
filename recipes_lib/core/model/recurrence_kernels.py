"""Hybrid models: which kernels their recurrences want, and which of them are not installed.

Qwen3.5, Qwen3-Next, LFM2, Mamba and their kin carry a state from token to token. transformers has
each recurrence twice: as a kernel of another package, and as a loop in plain PyTorch and fp32,
which it takes where the package is missing. The loop is right and slow: 1.22 s a step where the
kernels of flash-linear-attention take 0.70 s (transformers#48718). transformers says so once, in
the first forward, and not where its messages are off.

A state also carries a text past any mask, so packed documents read each other, unless the kernel
gets their borders by itself. `probe.leak_between_documents` sees it.
"""

from __future__ import annotations

import inspect
import re
import sys
from importlib.util import find_spec
from typing import Any

# How the code of a family in transformers names a kernel and its package.
KERNEL = re.compile(r'use_kernel_func_from_hub_with_fallback\("\w+", "(\w+)"\)')
# What pip calls the packages.
INSTALLED_AS = {
    "causal_conv1d": "causal-conv1d",
    "fla": "flash-linear-attention",
    "mamba_ssm": "mamba-ssm",
}


def recurrence_packages(model: Any) -> list[str]:
    """The packages whose kernels the recurrences of `model` want, as Python imports them."""
    packages: set[str] = set()
    for module in {type(each).__module__ for each in model.modules()}:
        if module.startswith("transformers.models."):
            packages.update(KERNEL.findall(inspect.getsource(sys.modules[module])))
    return sorted(packages)


def missing_kernels(model: Any) -> list[str]:
    """Those that are not installed, by their names for pip: a slow loop takes their place."""
    missing = [name for name in recurrence_packages(model) if find_spec(name) is None]
    return [INSTALLED_AS.get(package, package) for package in missing]


def slow_recurrence(model: Any) -> str:
    """A sentence on the kernels that are missing, or ""."""
    missing = missing_kernels(model)
    if not missing:
        return ""
    names = " ".join(missing)
    return (
        f"{type(model).__name__} has recurrent layers, and transformers computes them in a slow "
        f"loop in fp32 (published: 2.5 times the time of a step): pip install {names}, on a GPU. "
        f"Give one document per row: packed ones read each other."
    )
