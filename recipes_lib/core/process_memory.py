"""What something adds to the memory of a process, libraries outside of PyTorch included.

    answer, added = added_bytes(run)        # the most that was added at any moment of run()

The bytes of tensors say nothing about a runtime with memory of its own, such as ExecuTorch or ONNX
Runtime. So this asks the operating system for the resident set of the process: the pages of memory
that it really has. It is coarse, some hundred kilobytes, and memory that was freed before and is
used again is not seen. So measure in a process that has done little else: `core.launch.launch`
with one rank starts a new one.

Linux only: the other systems do not let a program reset its peak.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # written to CLEAR, it makes the peak what is resident now
KIB = 1024  # the unit of the numbers in STATUS


def can_measure() -> bool:
    """Whether this system tells the peak of a process and lets it be reset."""
    return STATUS.exists() and CLEAR.exists()


def added_bytes(run: Callable[[], Any]) -> tuple[Any, int | None]:
    """What `run()` returns, and the bytes that it added to the process at its peak.

    None in place of bytes where the system does not tell them.
    """
    if not can_measure():
        return run(), None
    gc.collect()
    CLEAR.write_text(RESET_PEAK)
    before = _resident("VmRSS")
    answer = run()
    return answer, max(_resident("VmHWM") - before, 0)


def _resident(name: str) -> int:
    """One of the process's numbers, in bytes: VmRSS is now, VmHWM the most since the reset."""
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * KIB
    raise RuntimeError(f"{STATUS} has no line {name}")
