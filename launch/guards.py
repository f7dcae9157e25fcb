"""What a training script can see of a start that would silently train something else.

A launcher tells each process by environment variables who it is. If they do not say what the user
believes, nothing fails: two processes train the same rows, or one trains where two were meant to.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SET_BY_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
LIBRARIES = ("FSDP", "DEEPSPEED")


def asks_for(library: str) -> bool:
    """Whether `accelerate launch` has put FSDP or DEEPSPEED into the environment."""
    return os.environ.get(f"ACCELERATE_USE_{library}", "false").lower() == "true"


# --- before the ranks find each other -------------------------------------------------------------


def require_torchrun(expected_ranks: int | None = None) -> None:
    """Refuse a process that is no rank of a group, or of a group of another size.

    `accelerate launch --cpu --num_processes 2` starts one process, and `srun python` starts many
    that know nothing of each other. Both look like a training on two ranks.
    """
    missing = [name for name in SET_BY_TORCHRUN if name not in os.environ]
    if missing:
        raise ValueError(
            f"this process is not part of a group of ranks ({', '.join(missing)} not set): start "
            f"it with `torchrun --standalone --nproc-per-node 2 launch/train.py`; under srun, "
            f"start one torchrun on each machine, and on CPUs use torchrun in place of "
            f"`accelerate launch --cpu`, which starts one process"
        )
    ranks = int(os.environ["WORLD_SIZE"])
    if expected_ranks not in (None, ranks):
        raise ValueError(f"{ranks} rank(s) have started, not --ranks {expected_ranks}")


def refuse_settings_of_accelerate() -> None:
    """Refuse FSDP or DeepSpeed in the environment: a script without `Accelerator` reads neither."""
    for library in filter(asks_for, LIBRARIES):
        raise ValueError(
            f"the configuration of accelerate asks for {library}, and this script does not read "
            f"it: start launch/train_with_accelerate.py, or choose by --strategy with torchrun"
        )


# --- when they have found each other --------------------------------------------------------------


def of_all_ranks(value: Any) -> list[Any]:
    """Each rank's value."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def require_rows_of_ranks(rows: torch.Tensor, *, shared: bool) -> None:
    """Refuse the same rows [B, S] on ranks that divide a batch, or others on ranks that share it.

    Reading the same ones, ranks compute the same gradient, and learn no more than one rank does.
    """
    digests = of_all_ranks(hashlib.sha256(rows.cpu().numpy().tobytes()).hexdigest())
    different = len(set(digests))
    if different != (1 if shared else len(digests)):
        raise ValueError(
            f"{len(digests)} ranks read {different} different set(s) of rows: ranks that share "
            f"every layer need the whole batch, and all others rows of their own"
        )


def require_shared_folder(folder: Path) -> None:
    """Refuse a folder on a disk of each machine, where none has a whole checkpoint."""
    mark = [f".seen-by-all-{uuid.uuid4().hex}"]
    dist.broadcast_object_list(mark, src=0)
    path = folder / mark[0]
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        path.touch()
    dist.barrier()
    found = of_all_ranks(path.exists())
    if dist.get_rank() == 0:
        path.unlink()
    if not all(found):
        blind = [rank for rank, sees in enumerate(found) if not sees]
        raise ValueError(
            f"ranks {blind} do not see what rank 0 writes to {folder}: give a folder that all "
            f"machines share, such as one on NFS or Lustre"
        )


def require_what_accelerate_promised(accelerator: Any) -> None:
    """Refuse an `Accelerator` that does not do what the environment asks for.

    On CPU ranks it switches FSDP off, and with DeepSpeed it can come to one process per group. Both
    are silent: the first trains as DDP, the second trains the same rows on every rank.
    """
    ranks = int(os.environ["WORLD_SIZE"])
    if accelerator.num_processes != ranks:
        raise ValueError(
            f"torchrun has started {ranks} ranks, and accelerate sees {accelerator.num_processes}: "
            f"each would train the same rows alone; on CPUs set ACCELERATE_USE_CPU=true"
        )
    kind = accelerator.distributed_type.value
    for library in filter(asks_for, LIBRARIES):
        if kind != library:
            raise ValueError(
                f"the configuration asks for {library}, and accelerate has chosen {kind}: it has "
                f"{library} for GPUs only; on CPU ranks use launch/train.py with --strategy"
            )
