"""Bandwidth test: how fast ranks exchange tensors, and what that predicts for a step.

Problem    A step on several ranks takes longer than its arithmetic, and nobody knows whether the
           network, the library or the recipe is to blame.
Idea       Time each collective alone, over sizes from a few KiB to many MiB. Seconds divided into
           bytes is not comparable: an all-reduce moves every byte twice. So the bytes are those
           that a rank has to send, in a ring of N ranks:

               bus bandwidth = bytes / seconds x factor
               all_reduce                                        factor 2 (N-1)/N
               all_gather, reduce_scatter, all_to_all            factor   (N-1)/N
               send (each to its neighbour), broadcast           factor    1

           It has one value for all collectives and all N if the links are the limit, and the data
           sheet of the links says what it should be. Two numbers describe the curve over sizes:

               seconds = messages x latency + bytes sent / bandwidth

           Small tensors pay for the messages, large ones for the bytes.
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
from dataclasses import dataclass, replace

import torch
from torch import distributed

from recipes_lib.core.checks import check_choice
from recipes_lib.core.measure.machine import synchronize
from recipes_lib.core.ranks import group_device, rank, world_size
from recipes_lib.core.ranks.agreement import agree
from recipes_lib.core.ranks.collectives import all_gather, exchange, reduce_scatter
from recipes_lib.core.ranks.traffic import ring_bytes

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "broadcast")
FP32_BYTES = 4
ROUNDS = 5  # of which the fastest counts: whatever else runs can only slow them
ROUND_SECONDS = 0.05  # in which a small tensor is sent many times
MOST_CALLS = 200  # in a round, of a tensor that is small
FEWEST_SIZES = 3  # a line goes through any two points exactly, and says nothing of its error

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
    """One collective of one size: `size` bytes of the whole tensor, `seconds` per call.

    The seconds are those of the slowest rank, in the fastest of several rounds.
    """

    kind: str
    size: int
    ranks: int
    seconds: float

    @property
    def bandwidth(self) -> float:
        """Bytes of the tensor per second."""
        return self.size / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second that a rank sends, to compare with its link."""
        return self.bandwidth * bus_factor(self.kind, self.ranks)


def measure_bus_bandwidth(kind: str, sizes: Sequence[int]) -> list[BusPoint]:
    """Time one kind of collective over sizes. All ranks call it, and all get the same points.

    Args:
        kind: one of KINDS; "send" is a ring, in which each rank sends to the next.
        sizes: bytes of the whole tensor in fp32, each a multiple of the ranks x 4.
    Raises ValueError if the ranks differ, for an unknown kind, and for sizes that do not divide.
    """
    agree(kind=kind, sizes=list(sizes))
    check_choice(KINDS, kind=kind)
    ranks = world_size()
    least = ranks * FP32_BYTES
    if any(size % least for size in sizes):
        raise ValueError(f"sizes={list(sizes)}: give multiples of {least}, ranks x bytes")
    points = []
    for size in sizes:
        seconds = _fastest_round(_collective(kind, size // FP32_BYTES))
        points.append(BusPoint(kind, size, ranks, seconds))
    return points


def _collective(kind: str, elements: int) -> Callable[[], object]:
    """A function that runs the collective once, on tensors that are there already."""
    ranks = world_size()
    me = rank()
    device = group_device()
    whole = torch.ones(elements, device=device)
    other = torch.ones(elements, device=device)
    part = torch.ones(elements // ranks, device=device)

    def send() -> None:
        to, source = (me + 1) % ranks, (me - 1) % ranks
        for work in exchange(whole, other, target=to, source=source):
            work.wait()

    calls = {
        "all_reduce": lambda: distributed.all_reduce(whole),
        "all_gather": lambda: all_gather(whole, part),
        "reduce_scatter": lambda: reduce_scatter(part, whole),
        "all_to_all": lambda: distributed.all_to_all_single(other, whole),
        "send": send,
        "broadcast": lambda: distributed.broadcast(whole, src=0),
    }
    return calls[kind]


def _fastest_round(call: Callable[[], object]) -> float:
    """Seconds per call of the slowest rank, in the fastest round."""
    _slowest([_timed(call, 1)])  # the first call sets up the links
    once = _slowest([_timed(call, 1)])[0]
    # All ranks know the same time by now, and so make as many calls.
    calls = min(math.ceil(ROUND_SECONDS / once), MOST_CALLS)
    taken = []
    for _ in range(ROUNDS):
        distributed.barrier()
        taken.append(_timed(call, calls) / calls)
    return min(_slowest(taken))


def _timed(call: Callable[[], object], calls: int) -> float:
    """Seconds of all the calls together."""
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize()
    return time.perf_counter() - start


def _slowest(seconds: list[float]) -> list[float]:
    """Each of the times, on the rank that took longest for it."""
    times = torch.tensor(seconds, dtype=torch.float64, device=group_device())
    distributed.all_reduce(times, op=distributed.ReduceOp.MAX)
    return times.tolist()


# --- the arithmetic -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """What one kind of collective costs on these ranks: `latency` in seconds per message, and
    `bytes_per_second` that a rank sends.

    `largest_residual` is the largest distance of a measured time from the formula, relative to the
    time.
    """

    kind: str
    ranks: int
    latency: float
    bytes_per_second: float
    largest_residual: float = 0.0

    def seconds(self, size: float) -> float:
        """Of a call on a tensor of `size` bytes: its messages and its bytes."""
        sent = size * bus_factor(self.kind, self.ranks)
        return messages(self.kind, self.ranks) * self.latency + sent / self.bytes_per_second


def bus_factor(kind: str, ranks: int) -> float:
    """Bytes that a rank sends for each byte of the tensor; a broadcast passes all of them on."""
    if kind == "broadcast":
        return 1.0
    return ring_bytes(kind, 1.0, ranks)


def messages(kind: str, ranks: int) -> int:
    """How many messages follow each other in a ring before a collective is complete."""
    if kind == "send":
        return 1
    if kind == "all_reduce":
        return 2 * (ranks - 1)
    return ranks - 1


def fit_link(points: Sequence[BusPoint]) -> Link:
    """The latency and the bandwidth of one kind: those of its smallest and its largest tensor.

    The line goes through these two points. How far the others are from it is `largest_residual`.
    Of several points of one size the fastest counts: on a busy machine, measure again and give all.

    Raises ValueError for fewer than three sizes, and if the largest tensor takes no longer than the
    smallest.
    """
    fastest: dict[int, BusPoint] = {}
    for point in sorted(points, key=lambda point: point.seconds, reverse=True):
        fastest[point.size] = point
    if len(fastest) < FEWEST_SIZES:
        raise ValueError(f"give points of {FEWEST_SIZES} sizes or more")
    smallest = fastest[min(fastest)]
    largest = fastest[max(fastest)]
    if largest.seconds <= smallest.seconds:
        raise ValueError(
            "the time does not grow with the bytes: give sizes that differ more, and measure on a "
            "quiet machine"
        )
    kind, ranks = smallest.kind, smallest.ranks
    more_bytes = (largest.size - smallest.size) * bus_factor(kind, ranks)
    bytes_per_second = more_bytes / (largest.seconds - smallest.seconds)
    of_messages = smallest.seconds - smallest.size * bus_factor(kind, ranks) / bytes_per_second
    # Below 0 if even the smallest tensor is so large that its messages cost nothing beside it.
    latency = max(of_messages, 0.0) / messages(kind, ranks)
    line = Link(kind, ranks, latency, bytes_per_second)
    residuals = [abs(line.seconds(point.size) / point.seconds - 1) for point in fastest.values()]
    return replace(line, largest_residual=max(residuals))
