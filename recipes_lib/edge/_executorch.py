"""ExecuTorch's runtime in this process: its kernels, and how many threads it computes with.

The runtime has one pool of threads for all files. It follows neither `torch.set_num_threads` nor
OMP_NUM_THREADS. Each loaded file keeps a pointer to the pool as it was: with another size there is
a new pool, and the next call of a file that was loaded before ends the whole process (a
segmentation fault). So the number is set before the first file is loaded, and then it stays.

    executorch_runtime(threads=1)     the pool has one thread; it stays if it has one already
    executorch_runtime(threads=2)     ValueError: files are loaded that would crash
"""

from __future__ import annotations

from typing import Any

from recipes_lib.core.measure.machine import require

_chosen: list[int] = []  # the number of this process, once a file asks for one


def executorch_runtime(*, threads: int) -> Any:
    """The runtime, which computes with so many threads, and with kernels for whole numbers."""
    if _chosen and _chosen != [threads]:
        raise ValueError(
            f"threads={threads}: this process runs files with {_chosen[0]} already, and another "
            f"number would crash them: give threads={_chosen[0]}, or use another process"
        )
    bindings = require("executorch.extension.pybindings.portable_lib")
    if bindings._threadpool_get_thread_count() != threads:
        bindings._unsafe_reset_threadpool(threads)
    _chosen[:] = [threads]
    require("executorch.kernels.quantized")  # registers its kernels
    return require("executorch.runtime").Runtime.get()
