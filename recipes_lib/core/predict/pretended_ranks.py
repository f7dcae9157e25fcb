"""One rank among many, without the others and without their GPUs.

    predict(build, ranks=64)      # one process, no data, seconds instead of a cluster

The group of ranks is pretended: every collective returns at once and moves nothing. A rank still
makes all buffers that it would make for it, so the bytes are its own. Where it asks the others for
a number, they say what it says itself. Times say nothing.

    gloo takes more    On CPUs gloo has no reduce-scatter: it copies all that it gets, sums the
                       copies up, and gives each rank its part. So a measured step of FSDP has one
                       copy more of the gradients of a block, or of the output layer. NCCL has none,
                       and neither has the prediction.
    messages           A real rank holds what it has sent until it waits for it, and a pretended one
                       has nothing to wait for: in a pipeline it keeps a message less.

Source: PyTorch, torch.testing._internal.distributed.fake_pg.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist
from torch import nn

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


@contextlib.contextmanager
def buckets_without_data() -> Iterator[None]:
    """On a pretended rank DistributedDataParallel takes tensors without data."""
    patches = {
        "Reducer": _BucketsWithoutData,
        "Logger": mock.MagicMock(),
        "_verify_params_across_processes": mock.MagicMock(),
        "_broadcast_coalesced": mock.MagicMock(),
    }
    with mock.patch.multiple(dist, **patches):
        yield


class _BucketsWithoutData:
    """What DistributedDataParallel's reducer keeps: buckets into which it copies each gradient.

    With `gradient_as_bucket_view` a gradient then is its part of a bucket. Otherwise both stay.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        buckets: list[list[int]],
        limits: list[int],
        group: Any,
        sparse: list[bool],
        cap: int,
        find_unused: bool,
        as_views: bool,
        *ignored: Any,
    ) -> None:
        """DDP's buckets on a pretended rank: gradients are averaged with nobody."""
        self._as_views = as_views
        self._still_to_come = 0  # without `no_sync`, in this backward
        self._places: dict[nn.Parameter, torch.Tensor] = {}
        for indices in buckets:
            inside = [parameters[index] for index in indices]
            sizes = [parameter.numel() for parameter in inside]
            parts = inside[0].new_empty(sum(sizes)).split(sizes)
            for parameter, part in zip(inside, parts, strict=True):
                self._places[parameter] = part.view(parameter.shape)
                parameter.register_post_accumulate_grad_hook(self._gradient_arrived)

    def prepare_for_backward(self, outputs: list[torch.Tensor]) -> None:
        """The next backward averages its gradients."""
        self._still_to_come = len(self._places)

    def _gradient_arrived(self, parameter: nn.Parameter) -> None:
        if self._still_to_come == 0:
            return
        self._still_to_come -= 1
        place = self._places[parameter].copy_(parameter.grad)
        if self._as_views:
            parameter.grad = place

    def __getattr__(self, name: str) -> Callable[..., None]:
        """On a pretended rank all else that buckets do takes no memory."""
        return _do_nothing


def _do_nothing(*ignored: Any, **options: Any) -> None:
    pass
