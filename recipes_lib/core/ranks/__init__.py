"""Who am I among the ranks?

A rank is one of the processes that train one model together; `rank_pool` and `torchrun` start them.
A process that is alone is rank 0 of 1. What ranks do together:

agreement       ranks that differ, or of which one fails: an error on all of them
collectives     gather, scatter and exchange one tensor, sum a few numbers over ranks
gradient_norm   clip by the norm of all gradients, of which each rank holds a part
measured_bytes  what one rank holds now: bytes of parameters, gradients and optimizer states
meshes          places of the ranks along named axes
rank_pool       ranks that stay alive: several functions on the same processes
run_result      what a training run on several ranks leaves behind, as plain numbers
traffic         what a step sends to other ranks: calls and bytes by kind of collective
weighted_step   a rank's rows, and one optimizer step in which every token weighs the same
"""

from __future__ import annotations

import torch
from torch import distributed


def rank() -> int:
    """The number of this rank; 0 in a process that is alone."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def world_size() -> int:
    """How many ranks there are; 1 in a process that is alone."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def meet() -> None:
    """Wait until all ranks are here."""
    if distributed.is_initialized():
        distributed.barrier()


def group_device() -> torch.device:
    """Where a tensor has to be for a collective: this rank's GPU, or the CPU."""
    if "nccl" in str(distributed.get_backend_config()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
