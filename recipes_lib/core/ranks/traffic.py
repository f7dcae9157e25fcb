"""What a step sends to other ranks: calls and bytes by kind of collective.

    with count_traffic() as traffic:
        step(model, batch)
    traffic.calls       {"all_gather": 9, "reduce_scatter": 5}
    traffic.sent        bytes that this rank sends

B are the bytes of the tensor that all ranks have together. What a rank sends of them follows from N
ranks in a ring, each of which passes chunks to its neighbour:

    reduce_scatter, all_gather      (N-1)/N x B     N-1 times a chunk of B/N
    all_reduce                    2 (N-1)/N x B     the two above, one after the other
    all_to_all                      (N-1)/N x B     all but the chunk that stays here
    broadcast, reduce, gather, …    (N-1)/N x B     on average over the ranks
    send                                    B

So do NCCL and gloo with large tensors. Counted are the calls of this thread and of its backward:
those of DistributedDataParallel, `fully_shard`, DTensor, pipelines and `torch.distributed` itself.

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

from recipes_lib.core.model.bytes_of_tensors import tensor_bytes


@dataclass
class Traffic:
    """Calls, and bytes that this rank sends, by kind."""

    calls: dict[str, int] = field(default_factory=dict)
    sent_by_kind: dict[str, float] = field(default_factory=dict)

    @property
    def sent(self) -> int:
        """Bytes that this rank sends, of all kinds."""
        return round(sum(self.sent_by_kind.values()))

    def add(self, kind: str, sent: float) -> None:
        """Enter one call of a collective."""
        self.calls[kind] = self.calls.get(kind, 0) + 1
        self.sent_by_kind[kind] = self.sent_by_kind.get(kind, 0) + sent


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count every collective of this rank inside of the context."""
    traffic = Traffic()
    with _TrafficCounter(traffic):
        yield traffic


def ring_bytes(kind: str, whole: float, ranks: int) -> float:
    """Bytes that one of `ranks` sends for a collective over a tensor of `whole` bytes."""
    if kind == "send":
        return whole
    once = whole * (ranks - 1) / ranks
    if kind == "all_reduce":
        return 2 * once
    return once


# --- how PyTorch's operators are read -------------------------------------------------------------

LIBRARIES = ("c10d", "_c10d_functional", "_dtensor")
# The kind of a collective, by what its operator's name contains: the first that it does.
KINDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
}
OF_PARTS = ("all_gather", "gather", "scatter")  # every operator has a part, and not all the whole


class _TrafficCounter(TorchDispatchMode):
    """Sees every operator before it runs. What an operator calls inside is not seen again."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self._traffic = traffic

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Count the collective, if this operator is one, and run it."""
        kwargs = kwargs or {}
        kind = _kind_of(func._schema.name)
        if kind is not None:
            names = [argument.name for argument in func._schema.arguments]
            self._enter_call(kind, dict(zip(names, args)) | kwargs)
        elif func._schema.name == "_c10d_functional::batch_p2p_ops":
            directions, _, _, tensors, *_ = args
            for direction, tensor in zip(directions, tensors):
                if direction == "isend":
                    self._traffic.add("send", tensor_bytes(tensor))
        return func(*args, **kwargs)

    def _enter_call(self, kind: str, given: dict[str, Any]) -> None:
        """Enter the bytes that this rank sends in a collective."""
        group = _group_of_collective(given)
        sizes = [size for size in map(_bytes_of, given.values()) if size > 0]
        if kind in OF_PARTS:
            whole = min(sizes, default=0) * group.size()
        else:
            whole = max(sizes, default=0)
        sent = ring_bytes(kind, whole, group.size())
        if kind == "all_to_all":
            tensors = given.get("input", given.get("input_tensors"))
            whole = _bytes_of(tensors)
            sent = whole - _staying(tensors, given.get("input_split_sizes"), whole, group)
        self._traffic.add(kind, sent)


def _kind_of(operator: str) -> str | None:
    library, _, name = operator.partition("::")
    if library in LIBRARIES:
        for part, kind in KINDS.items():
            if part in name.replace("_", ""):
                return kind
    return None


def _bytes_of(value: Any) -> int:
    """Bytes of the tensors in an argument of an operator."""
    leaves = tree_leaves(value)
    return sum(tensor_bytes(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))


def _group_of_collective(given: dict[str, Any]) -> ProcessGroup:
    group = given.get("process_group", given.get("group_name"))
    if isinstance(group, str):
        return _resolve_process_group(group)
    if isinstance(group, torch.ScriptObject):
        return ProcessGroup.unbox(group)
    return group


def _staying(tensors: Any, rows: list[int] | None, whole: int, group: ProcessGroup) -> float:
    """Bytes of an all-to-all that this rank keeps for itself."""
    place = distributed.get_rank(group)
    if isinstance(tensors, list):  # one for each rank
        return tensor_bytes(tensors[place])
    if rows and sum(rows) > 0:
        return whole * rows[place] / sum(rows)
    return whole / group.size()
