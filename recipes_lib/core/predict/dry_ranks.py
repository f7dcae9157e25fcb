"""The memory of one rank among many, without the others and without their GPUs.

    peak = rank_peak(build, ranks=64)       # one process, no data, seconds instead of a cluster
    peak.total                              # bytes
    peak.kinds                              # the same bytes by kind, at the moment of the peak

Two pretences make that possible:

    a group of ranks that is fake    Every collective returns at once and moves nothing. A rank
                                     still makes all buffers that it would make for it.
    tensors that are fake            They have shapes and no data (`core.measure.dry_run`).

What a step allocates depends on shapes only, so bytes are exact as far as the account goes:
PyTorch's own tracker follows each storage, those that FSDP empties and fills again included. Times
say nothing.

Source: PyTorch, torch.distributed._tools.fsdp2_mem_tracker; torch.testing._internal.distributed.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist

from recipes_lib.core.checks import check_whole
from recipes_lib.core.measure import dry, dry_run

Step = Callable[[], Any]
Build = Callable[[Any], tuple[torch.nn.Module, torch.optim.Optimizer, Step]]

# What stays on the host when a sharded model is offloaded, in the words of PyTorch's tracker.
AT_REST = ("sharded param", "sharded grad", "optstate")


@dataclass(frozen=True)
class RankPeak:
    """What one rank holds at its worst moment.

    `total` is in bytes, and `kinds` says of what it consists, in the words of PyTorch's tracker:
    "sharded param", "unsharded param", "activation", "all gather", and so on. `beside_shards` is
    the largest number of bytes beside the shards of weights, gradients and states. With offload
    these are in host memory, and the device holds the rest.
    """

    total: int
    kinds: dict[str, int]
    beside_shards: int


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
        yield
    finally:
        dist.destroy_process_group()


def rank_peak(
    build: Build, *, ranks: int, rank: int = 0, mesh: dict[str, int] | None = None
) -> RankPeak:
    """Bytes of one rank in one training step after the first, at its worst moment.

    Args:
        build: is called with a device mesh of all ranks, and returns model, optimizer and a step.
            All tensors that it makes are fake; it makes them on "cpu".
        ranks: how many are pretended.
        rank: which of them this one is.
        mesh: the dimensions of the mesh by name, as {"replicate": 8, "shard": 8}; by default it
            has one dimension, "shard".

    Raises ValueError as `pretended_ranks` does, inside of a dry run, and if the dimensions do not
    multiply to `ranks`.
    """
    if dry():
        raise ValueError("this is a dry run already: call rank_peak outside of it")
    if mesh is None:
        mesh = {"shard": ranks}
    check_whole(**mesh)
    product = 1
    for size in mesh.values():
        product *= size
    if product != ranks:
        raise ValueError(f"mesh={mesh}: its dimensions multiply to {product}, not to ranks={ranks}")
    with pretended_ranks(ranks, rank=rank):
        # A mesh reads the numbers of its ranks, so it is made of real tensors.
        device_mesh = dist.init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        with dry_run(), _quiet():
            model, optimizer, step = build(device_mesh)
            # The first step makes the states of the optimizer. And it plans the operators on
            # shards, for which PyTorch makes tensors of full size that no rank ever holds.
            step()
            return _tracked(model, optimizer, step)


def _tracked(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: Step) -> RankPeak:
    tracker = _tracker(model, optimizer)
    tracker.track_external(model, optimizer)
    _count_left_out(tracker, model)
    with tracker:
        step()
    kinds: dict[str, int] = {}
    for on_device in tracker.get_tracker_snapshot("peak").values():
        for kind, size in on_device.items():
            name = getattr(kind, "value", kind).lower()
            kinds[name] = kinds.get(name, 0) + size
    total = kinds.pop("total")
    return RankPeak(total=total, kinds=kinds, beside_shards=tracker.beside_shards)


def _tracker(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """PyTorch's tracker for this kind of model, which also remembers the peak beside the shards."""
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        return _with_second_peak(FSDPMemTracker)(model, optimizer)
    return _with_second_peak(MemTracker)()


def _count_left_out(tracker: Any, model: torch.nn.Module) -> None:
    """Let the tracker of a sharded model count parameters that a rank keeps without `fully_shard`.

    It looks at groups only, and would miss them.
    """
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker, _FSDPRefType
    from torch.distributed.tensor import DTensor

    if not isinstance(tracker, FSDPMemTracker):
        return
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            tracker._update_and_maybe_create_winfos(parameter, _FSDPRefType.SHARDED_PARAM)


def _with_second_peak(tracker: type) -> type:
    """`tracker` with the peak of what is no shard of weights, gradients or states."""

    class Tracker(tracker):
        beside_shards = 0

        def _update_peak_stats(self, peak_state: Any) -> None:
            super()._update_peak_stats(peak_state)
            for on_device in self._curr_mem_snap.values():
                at_rest = 0
                for kind, size in on_device.items():
                    if getattr(kind, "value", kind).lower() in AT_REST:
                        at_rest += size
                self.beside_shards = max(self.beside_shards, on_device["Total"] - at_rest)

    return Tracker


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without PyTorch's warnings of what a pretended group cannot do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
