"""What a step sends to other ranks: calls and bytes by kind of collective.

    with count_traffic() as traffic:
        step(model, batch)
    traffic.calls       {"all_gather": 9, "reduce_scatter": 5}
    traffic.bytes       {"all_gather": 2_888_192, …}        of the whole tensors
    traffic.sent        bytes that this rank sends

`bytes` counts the tensor that all ranks together have, before or after: the gathered one of an
all-gather, the one that is to be reduced of a reduce-scatter. What a rank sends of these B bytes
follows from N ranks in a ring, each of which passes chunks to its neighbour:

    reduce_scatter, all_gather      (N-1)/N x B     N-1 times a chunk of B/N
    all_reduce                    2 (N-1)/N x B     the two above, one after the other
    all_to_all                      (N-1)/N x B     all but the chunk that stays here
    broadcast, reduce, gather, …    (N-1)/N x B     on average over the ranks
    send                                    B

A library may use a tree instead of a ring, or a switch that reduces. The volume is that of a ring
for large tensors on NCCL and gloo.

Counted are the calls of this thread and of its backward: those of DistributedDataParallel,
`fully_shard`, DTensor, pipelines and of `torch.distributed` itself. Barriers carry no tensor, and
receiving is the other side of a send.

Source: "Performance reported by NCCL tests" (nccl-tests, doc/PERFORMANCE.md); Thakur et al.,
"Optimization of collective communication operations in MPICH", 2005.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed
from torch.distributed.distributed_c10d import ProcessGroup, _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recipes_lib.core.checks import check_choice, check_whole
from recipes_lib.core.model.sizes import tensor_bytes

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "broadcast")
RARE_KINDS = ("reduce", "gather", "scatter")


@dataclass
class Traffic:
    """Calls, bytes of the whole tensors, and bytes that this rank sends, by kind."""

    calls: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    sent_by_kind: dict[str, float] = field(default_factory=dict)

    @property
    def sent(self) -> int:
        """Bytes that this rank sends, of all kinds."""
        return round(sum(self.sent_by_kind.values()))

    def add(self, kind: str, whole: int, sent: float) -> None:
        """Enter one call."""
        self.calls[kind] = self.calls.get(kind, 0) + 1
        self.bytes[kind] = self.bytes.get(kind, 0) + whole
        self.sent_by_kind[kind] = self.sent_by_kind.get(kind, 0) + sent


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count every collective of this rank inside of the context."""
    traffic = Traffic()
    with _Counter(traffic):
        yield traffic


def ring_bytes(kind: str, whole: float, ranks: int) -> float:
    """Bytes that one of `ranks` sends for a collective over a tensor of `whole` bytes.

    Raises ValueError for an unknown kind, and for fewer ranks than one.
    """
    check_choice((*KINDS, *RARE_KINDS), kind=kind)
    check_whole(ranks=ranks)
    if kind == "send":
        return whole
    once = whole * (ranks - 1) / ranks
    if kind == "all_reduce":
        return 2 * once
    return once


# --- how PyTorch's operators are read -------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """The kind of an operator, and the argument that holds the whole tensor or one rank's part."""

    kind: str
    argument: str
    of_one_rank: bool = False  # the whole is as many times larger as there are ranks


# The operators behind `torch.distributed`, by name.
OPERATORS = {
    "c10d::allreduce_": Reading("all_reduce", "tensors"),
    "c10d::allreduce_coalesced_": Reading("all_reduce", "tensors"),
    "c10d::_allgather_base_": Reading("all_gather", "output_tensor"),
    "c10d::allgather_": Reading("all_gather", "output_tensors"),
    "c10d::allgather_coalesced_": Reading("all_gather", "output_lists"),
    "c10d::allgather_into_tensor_coalesced_": Reading("all_gather", "outputs"),
    "c10d::_reduce_scatter_base_": Reading("reduce_scatter", "input_tensor"),
    "c10d::reduce_scatter_": Reading("reduce_scatter", "input_tensors"),
    "c10d::reduce_scatter_tensor_coalesced_": Reading("reduce_scatter", "inputs"),
    "c10d::alltoall_": Reading("all_to_all", "input_tensors"),
    "c10d::alltoall_base_": Reading("all_to_all", "input"),
    "c10d::send": Reading("send", "tensors"),
    "c10d::broadcast_": Reading("broadcast", "tensors"),
    "c10d::reduce_": Reading("reduce", "tensors"),
    "c10d::gather_": Reading("gather", "input_tensors", of_one_rank=True),
    "c10d::scatter_": Reading("scatter", "output_tensors", of_one_rank=True),
}
# Those that return a new tensor, which DTensor uses.
FUNCTIONAL = {
    "all_reduce": Reading("all_reduce", "input"),
    "all_reduce_": Reading("all_reduce", "input"),
    "all_reduce_coalesced": Reading("all_reduce", "inputs"),
    "all_reduce_coalesced_": Reading("all_reduce", "inputs"),
    "all_gather_into_tensor": Reading("all_gather", "input", of_one_rank=True),
    "all_gather_into_tensor_out": Reading("all_gather", "input", of_one_rank=True),
    "all_gather_into_tensor_coalesced": Reading("all_gather", "inputs", of_one_rank=True),
    "reduce_scatter_tensor": Reading("reduce_scatter", "input"),
    "reduce_scatter_tensor_out": Reading("reduce_scatter", "input"),
    "reduce_scatter_tensor_coalesced": Reading("reduce_scatter", "inputs"),
    "all_to_all_single": Reading("all_to_all", "input"),
    "broadcast": Reading("broadcast", "input"),
    "broadcast_": Reading("broadcast", "input"),
    "isend": Reading("send", "tensor"),
}
OPERATORS |= {f"_c10d_functional::{name}": reading for name, reading in FUNCTIONAL.items()}
OPERATORS["_dtensor::shard_dim_alltoall"] = Reading("all_to_all", "input")


class _Counter(TorchDispatchMode):
    """Sees every operator before it runs. What an operator calls inside is not seen again."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self._traffic = traffic

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name
        if name in OPERATORS:
            names = [argument.name for argument in func._schema.arguments]
            self._enter(OPERATORS[name], dict(zip(names, args)) | kwargs)
        elif name == "_c10d_functional::batch_p2p_ops":
            self._enter_batch(*args)
        return func(*args, **kwargs)

    def _enter(self, reading: Reading, given: dict[str, Any]) -> None:
        group = _group_of(given)
        whole = _bytes_of(given[reading.argument])
        if reading.of_one_rank:
            whole *= group.size()
        sent = ring_bytes(reading.kind, whole, group.size())
        if reading.kind == "all_to_all":
            sent = whole - _staying(given, reading, whole, group)
        self._traffic.add(reading.kind, whole, sent)

    def _enter_batch(self, directions, peers, tags, tensors, *rest) -> None:
        for direction, tensor in zip(directions, tensors):
            if direction == "isend":
                self._traffic.add("send", tensor_bytes(tensor), tensor_bytes(tensor))


def _group_of(given: dict[str, Any]) -> ProcessGroup:
    group = given.get("process_group", given.get("group_name"))
    if isinstance(group, str):
        return _resolve_process_group(group)
    if isinstance(group, torch.ScriptObject):
        return ProcessGroup.unbox(group)
    return group


def _bytes_of(tensors: Any) -> int:
    return sum(tensor_bytes(tensor) for tensor in tree_leaves(tensors))


def _staying(given: dict[str, Any], reading: Reading, whole: int, group: ProcessGroup) -> float:
    """Bytes of an all-to-all that this rank keeps for itself."""
    place = distributed.get_rank(group)
    tensors = given[reading.argument]
    if isinstance(tensors, list):  # one for each rank
        return tensor_bytes(tensors[place])
    rows = given.get("input_split_sizes")
    if rows and sum(rows) > 0:
        return whole * rows[place] / sum(rows)
    return whole / group.size()
