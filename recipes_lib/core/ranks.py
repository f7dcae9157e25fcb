"""Who am I among the ranks?

A rank is one of the processes that train one model together. `core.launch`, `core.rank_pool` and
`torchrun` start them. A process that is alone is rank 0 of 1.

What ranks do together is in files of its own: `meshes` gives them places, `agreement` finds the one
that differs, `collectives` sends, `rank_rows` divides a batch, `gradient_norm` clips.
"""

from __future__ import annotations

import torch
from torch import distributed


def require_group() -> None:
    """Raise ValueError if this process is not one of several ranks."""
    if not distributed.is_initialized():
        raise ValueError(
            "there is no process group: call this inside of a function that "
            "recipes_lib.core.launch.launch or RankPool.run runs, or in a script that torchrun "
            "starts and that calls torch.distributed.init_process_group()"
        )


def rank() -> int:
    """The number of this rank; 0 in a process that is alone."""
    if not distributed.is_initialized():
        return 0
    return distributed.get_rank()


def world_size() -> int:
    """How many ranks there are; 1 in a process that is alone."""
    if not distributed.is_initialized():
        return 1
    return distributed.get_world_size()


def group_device() -> torch.device:
    """Where a tensor has to be for a collective of the default group: this rank's GPU, or the CPU.

    Raises ValueError without a process group.
    """
    require_group()
    if "nccl" in str(distributed.get_backend_config()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
