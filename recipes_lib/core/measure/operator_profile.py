"""Where the time of a step goes: its seconds by kind of operator.

    profile_operators(lambda: step(model, optimizer))
    {"matrix products": 1.71, "attention": 0.14, …, "other": 0.22}

The rate of matrix products bounds a step from below. What the other kinds take is the distance to
that limit. PyTorch's profiler times each operator; here every one is given to a kind:

    matrix products        of linear layers, the output layer's among them
    attention              the fused kernels; eager attention is products and elementwise work
    unpacking of 4 bits    of the weights in QLoRA
    casts and copies       between dtypes and layouts, fills with zeros
    elementwise and norms  the rest of the mathematics, and the fused kernels of compiled code
    loss                   softmax and targets, without the products
    optimizer              everything inside of its step
    other                  Python, the calls themselves, waiting

The kinds add up to the seconds of the step as it ran under the profiler, which slows a step of many
small operators. Compare shares, and take the seconds of a step from `measure`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Any

from torch.autograd import DeviceType, profiler

from recipes_lib.core.measure.allocator_peak import QUIET
from recipes_lib.core.measure.machine import machine, synchronize

KINDS = (
    "matrix products",
    "attention",
    "unpacking of 4 bits",
    "casts and copies",
    "elementwise and norms",
    "loss",
    "optimizer",
    "other",
)

# Parts of operators' names. The first kind that has one takes the operator.
NAMED = {
    "matrix products": ("::mm", "::addmm", "::bmm", "::baddbmm", "::_mm", "::matmul", "::linear"),
    "attention": ("scaled_dot_product", "flash_attention", "flex_attention"),
    "unpacking of 4 bits": ("dequantize_4bit", "dequantize_blockwise", "gemm_4bit", "gemv_4bit"),
    "loss": ("::_log_softmax", "::nll_loss", "cross_entropy"),
    "casts and copies": ("::copy_", "::_to_copy", "::clone", "::cat", "::fill_", "::zero_"),
    "other": ("::view", "::t", "::transpose", "::permute", "::expand", "::empty", "::slice"),
}
# What an operator that encloses others is called, and the kind of all that is in it.
ENCLOSING = {"optimizer": ("Optimizer.step",), "loss": ("ChunkedLoss", "CrossEntropy")}


def profile_operators(step: Callable[[], Any]) -> dict[str, float]:
    """Run `step` once under the profiler; its seconds by kind of operator, in the order of KINDS.

    On CUDA they are seconds of the device, and "other" is when it was idle. Run the step before:
    the first one makes the optimizer's states, and compiles what is compiled.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", QUIET)
    on_cuda = machine().device == "cuda"
    with profiler.profile(use_kineto=True, use_device="cuda" if on_cuda else None) as profile:
        synchronize()
        start = time.perf_counter()  # not before: on CUDA the profiler itself takes a while
        step()
        synchronize()
        seconds = time.perf_counter() - start
    kinds = _seconds_by_kind(profile.function_events, on_cuda=on_cuda)
    # Between the operators is Python.
    kinds["other"] = seconds - sum(kinds.values()) + kinds["other"]
    return kinds


def _seconds_by_kind(events: Iterable[Any], *, on_cuda: bool) -> dict[str, float]:
    """The seconds that each kind takes itself; on CUDA those of the kernels that it starts."""
    kinds = dict.fromkeys(KINDS, 0.0)
    for event in events:
        # On CUDA there is an event of each kernel, too. Its operator has counted it already.
        if event.device_type == DeviceType.CPU:
            own = event.self_device_time_total if on_cuda else event.self_cpu_time_total
            kinds[_kind_of(event)] += own / 1e6
    return kinds


def _kind_of(event: Any) -> str:
    kind = _kind_by_name(event.name)
    enclosing = _enclosing_kind(event)
    if enclosing == "optimizer" or kind != "matrix products":
        return enclosing or kind
    return kind


def _enclosing_kind(event: Any) -> str | None:
    """The kind of an operator around this one that decides for all that is in it."""
    while event is not None:
        for kind, names in ENCLOSING.items():
            if event.name.startswith(names):
                return kind
        event = event.cpu_parent
    return None


def _kind_by_name(name: str) -> str:
    for kind, parts in NAMED.items():
        if any(_names(part, name) for part in parts):
            return kind
    fused = "CompiledFxGraph" in name or name.startswith("triton_")
    if name.startswith("aten::") or fused:  # views of other names take hardly any time
        return "elementwise and norms"
    return "other"


def _names(part: str, name: str) -> bool:
    """Whether `part` is in `name`; with "::" in front it is all that follows, up to a suffix."""
    if not part.startswith("::"):
        return part in name
    return name == f"aten{part}" or name.startswith(f"aten{part}_")
