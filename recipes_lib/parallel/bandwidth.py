"""Bandwidth test: how fast ranks exchange tensors, and what that predicts for a step.

Problem    A step on several ranks takes longer than its arithmetic, and nobody knows whether the
           network, the library or the recipe is to blame.
Idea       Time each collective alone, over sizes from a few KiB to many MiB. Two numbers describe
           the times:

               seconds = messages x latency + bytes sent / bandwidth

           Small tensors pay for the messages, large ones for the bytes. What counts are the bytes
           that a rank sends, in a ring of N ranks, for each byte of the tensor:

               all_reduce                                        2 (N-1)/N
               all_gather, reduce_scatter                          (N-1)/N
               send (each to its neighbour)                            1

           Bytes sent per second are the *bus bandwidth*. If the links are the limit, it is the same
           for all collectives and all N, and the data sheet of the links says what it should be.
Saves      Nothing by itself. It tells where to look, before anything is optimized: with
           `count_traffic` it gives the seconds that a step has to send.
Costs      Some seconds for each kind of collective.
Use when   A new machine or network, a step that scales badly, a choice between strategies.
Not when   Communication overlaps with arithmetic: then the prediction is an upper bound of what
           it adds to the step, not the time itself.
In production   `nccl-tests`: `all_reduce_perf -b 8 -e 128M -f 2 -g 2`, which prints the same
           "busbw"; `NCCL_DEBUG=INFO` says which links and algorithms are in use.
Source     "Performance reported by NCCL tests" (nccl-tests, doc/PERFORMANCE.md); Thakur et al.,
           "Optimization of collective communication operations in MPICH", 2005.

Legend: N ranks, B bytes of the whole tensor, as `core.ranks.traffic` counts them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import distributed

from recipes_lib.core.measure.machine import synchronize
from recipes_lib.core.ranks import group_device, rank, world_size
from recipes_lib.core.ranks.agreement import agree
from recipes_lib.core.ranks.collectives import all_gather, exchange, reduce_scatter
from recipes_lib.core.ranks.traffic import ring_bytes

FP32_BYTES = 4
ROUNDS = 5  # of calls to time, the fastest counts: whatever else runs can only slow them
ROUND_SECONDS = 0.05  # in which a small tensor is sent many times
MOST_CALLS = 200  # in a round, of a tensor that is small

# --- the idea -------------------------------------------------------------------------------------


def ring_all_reduce(tensor: torch.Tensor) -> None:
    """Sum `tensor` over all ranks in place, as a ring does it: 2 (N-1) messages of B/N bytes.

    Each rank sends to the next and receives from the one before. In the first half of the turns a
    chunk travels and grows by one summand at each rank. In the second half the sums travel.
    """
    ranks = distributed.get_world_size()
    me = distributed.get_rank()
    chunks = tensor.tensor_split(ranks)
    for turn in range(2 * (ranks - 1)):
        given = chunks[(me - turn) % ranks]
        own = chunks[(me - turn - 1) % ranks]
        arrived = torch.empty_like(own)
        for work in exchange(given, arrived, target=(me + 1) % ranks, source=(me - 1) % ranks):
            work.wait()
        if turn < ranks - 1:
            own += arrived
        else:
            own.copy_(arrived)


# --- the technique --------------------------------------------------------------------------------


@dataclass(frozen=True)
class BusPoint:
    """One kind of collective on a tensor of `size` bytes: the seconds of a call.

    They are those of the slowest rank, in the fastest of several rounds.
    """

    kind: str
    size: int
    ranks: int
    seconds: float

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second that a rank sends, to compare with its link."""
        return ring_bytes(self.kind, self.size, self.ranks) / self.seconds


def measure_bus_bandwidth(kind: str, sizes: Sequence[int]) -> list[BusPoint]:
    """Time one kind of collective over sizes. All ranks call it, and all get the same points.

    Args:
        kind: "all_reduce", "all_gather", "reduce_scatter", or "send", a ring in which each rank
            sends to the next.
        sizes: bytes of the whole tensor in fp32, each a multiple of the ranks x 4.
    """
    agree(kind=kind, sizes=list(sizes))
    points = []
    for size in sizes:
        call = _call_of_collective(kind, size // FP32_BYTES)
        points.append(BusPoint(kind, size, world_size(), _fastest_call(call)))
    return points


def _call_of_collective(kind: str, elements: int) -> Callable[[], object]:
    """A call of the collective, on tensors that are there already."""
    whole = torch.ones(elements, device=group_device())
    other = torch.ones_like(whole)
    part = torch.ones(elements // world_size(), device=group_device())
    calls = {
        "all_reduce": partial(distributed.all_reduce, whole),
        "all_gather": partial(all_gather, whole, part),
        "reduce_scatter": partial(reduce_scatter, part, whole),
        "send": partial(_send_to_the_next, whole, other),
    }
    return calls[kind]


def _send_to_the_next(given: torch.Tensor, arrived: torch.Tensor) -> None:
    """The call whose bandwidth is that of sends: to the next rank, from the one before."""
    following = (rank() + 1) % world_size()
    before = (rank() - 1) % world_size()
    for work in exchange(given, arrived, target=following, source=before):
        work.wait()


def _fastest_call(call: Callable[[], object]) -> float:
    """Seconds of a collective's call, in the fastest of several rounds."""
    _seconds_of(call, times=1)  # the first call sets up the links
    # All ranks know the same seconds, those of the slowest. So all of them make as many calls.
    once = _seconds_of(call, times=1)
    times = min(math.ceil(ROUND_SECONDS / once), MOST_CALLS)
    return min(_seconds_of(call, times=times) for _ in range(ROUNDS)) / times


def _seconds_of(call: Callable[[], object], *, times: int) -> float:
    """Seconds of so many calls of a collective, on the rank that takes longest."""
    distributed.barrier()
    synchronize()
    start = time.perf_counter()
    for _ in range(times):
        call()
    synchronize()
    taken = time.perf_counter() - start
    of_the_slowest = torch.tensor(taken, dtype=torch.float64, device=group_device())
    distributed.all_reduce(of_the_slowest, op=distributed.ReduceOp.MAX)
    return of_the_slowest.item()


# --- the arithmetic -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """What one kind of collective costs on these ranks: `latency` in seconds per message, and
    `bytes_per_second` that a rank sends.
    """

    kind: str
    ranks: int
    latency: float
    bytes_per_second: float

    def seconds(self, size: float) -> float:
        """Of a collective's call on a tensor of `size` bytes: its messages and its bytes."""
        sent = ring_bytes(self.kind, size, self.ranks)
        return messages(self.kind, self.ranks) * self.latency + sent / self.bytes_per_second


def messages(kind: str, ranks: int) -> int:
    """How many messages follow each other in a ring before a collective is complete."""
    if kind == "send":
        return 1
    if kind == "all_reduce":
        return 2 * (ranks - 1)
    return ranks - 1


def fit_link(points: Sequence[BusPoint]) -> Link:
    """The latency and bandwidth of one kind of collective: of its smallest and largest tensor.

    The line goes through these two points.
    """
    smallest = min(points, key=_size_of_message)
    largest = max(points, key=_size_of_message)
    if largest.seconds <= smallest.seconds:
        raise ValueError(
            "the time does not grow with the bytes: give sizes that differ more, and measure on a "
            "quiet machine"
        )
    kind, ranks = smallest.kind, smallest.ranks
    more_bytes = ring_bytes(kind, largest.size - smallest.size, ranks)
    bytes_per_second = more_bytes / (largest.seconds - smallest.seconds)
    of_messages = smallest.seconds - ring_bytes(kind, smallest.size, ranks) / bytes_per_second
    # Below 0 if even the smallest tensor is so large that its messages cost nothing beside it.
    latency = max(of_messages, 0.0) / messages(kind, ranks)
    return Link(kind, ranks, latency, bytes_per_second)


def _size_of_message(point: BusPoint) -> int:
    return point.size
