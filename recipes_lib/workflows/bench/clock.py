"""The clock of comparisons that share the machine with others.

On a CPU it shows the seconds that this thread has computed: what else runs does not count. It sees
one thread, so it compares fairly with `torch.set_num_threads(1)` only. On a GPU it shows the time
of day, after all kernels have ended.
"""

from __future__ import annotations

import time

from recipes_lib.core.measure.machine import machine, synchronize


def now() -> float:
    """Seconds since some moment: only differences mean something."""
    if machine().device == "cpu":
        return time.thread_time()
    synchronize()
    return time.perf_counter()
