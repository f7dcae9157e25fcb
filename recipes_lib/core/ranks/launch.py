"""A function on several ranks from a notebook or a test, with no process left behind.

    loss = launch(train, ranks=4, steps=10)         # what train(steps=10) returns on rank 0

Each rank is a new process, which ends with the function. `core.rank_pool` keeps the processes for
the next function, and says what happens when a rank fails, hangs or is killed: here it is the same.

For several machines, and for runs that have to start again after a failure, use `torchrun`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from recipes_lib.core.ranks.rank_pool import RankPool


def launch(
    function: Callable[..., Any],
    /,
    *,
    ranks: int,
    device: str | None = None,
    timeout: float = 600.0,
    threads: int = 1,
    **arguments: Any,
) -> Any:
    """Call `function(**arguments)` on new ranks, and return what rank 0 returns.

    What the ranks print appears here, with the number of the rank in front of all but rank 0's.

    Args:
        function: of a module that can be imported. One that is written in a notebook cannot be.
        ranks: how many processes.
        device: "cpu" (gloo) or "cuda" (NCCL, a GPU for each rank); by default this machine's.
        timeout: seconds for the call. The start of the ranks does not count.
        threads: of PyTorch in each rank.
        arguments: anything that can be pickled; the function gets copies.

    Raises RankError with all tracebacks if a rank fails, ValueError if all ranks raise the same
    one, TimeoutError after `timeout` seconds, and ValueError for a function that a new process
    cannot import, for more ranks than GPUs, and for numbers out of range.
    """
    with RankPool(ranks=ranks, device=device, threads=threads) as pool:
        return pool.run(function, timeout=timeout, **arguments)
