"""One rank among many, without the others and without their GPUs.

    predict(build, ranks=64)      # one process, no data, seconds instead of a cluster

The group of ranks is pretended: every collective returns at once and moves nothing. A rank still
makes all buffers that it would make for it, so the bytes are its own. Times say nothing.

Source: PyTorch, torch.testing._internal.distributed.fake_pg.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch import distributed as dist

from recipes_lib.core.checks import check_whole


@contextlib.contextmanager
def pretended_ranks(ranks: int, *, rank: int = 0) -> Iterator[None]:
    """Inside, this process is one of `ranks` that do not exist; collectives leave data as it is.

    Raises ValueError for numbers out of range, and inside of a real process group.
    """
    check_whole(ranks=ranks)
    check_whole(rank=rank, least=0, most=ranks - 1)
    if dist.is_initialized():
        raise ValueError(
            "this process belongs to a group of ranks already: pretend others in a process of "
            "its own, or call torch.distributed.destroy_process_group() first"
        )
    try:
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as error:
        raise ValueError(
            f"PyTorch {torch.__version__} has no fake process group where 2.13 has it: "
            f"use a version that this package was tested with"
        ) from error
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what a pretended group cannot do
            yield
    finally:
        dist.destroy_process_group()
