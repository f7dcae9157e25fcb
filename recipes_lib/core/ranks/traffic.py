"""What a step sends to other ranks: calls and bytes by kind of collective.

    with count_traffic() as traffic:
        step(model, batch)
    traffic.calls       {"all_gather": 9, "reduce_scatter": 5}
    traffic.bytes       {"all_gather": 2_888_192, …}        of the whole tensors
    traffic.sent        bytes that this rank sends

`bytes` counts the tensor that all ranks have together. What a rank sends of these B
bytes follows from N ranks in a ring, each of which passes chunks to its neighbour:

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

from recipes_lib.core.model.sizes import tensor_bytes


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
    """Bytes that one of `ranks` sends for a collective over a tensor of `whole` bytes."""
    if kind == "send":
        return whole
    once = whole * (ranks - 1) / ranks
    if kind == "all_reduce":
        return 2 * once
    return once


# --- how PyTorch's operators are read -------------------------------------------------------------

# The operators behind `torch.distributed`, by name: the kind, and the argument that holds the whole
# tensor. A star says that it holds one rank's part, and the whole is as many times larger.
OPERATORS = {
    "c10d::allreduce_": ("all_reduce", "tensors"),
    "c10d::allreduce_coalesced_": ("all_reduce", "tensors"),
    "c10d::_allgather_base_": ("all_gather", "output_tensor"),
    "c10d::allgather_": ("all_gather", "output_tensors"),
    "c10d::allgather_coalesced_": ("all_gather", "output_lists"),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", "outputs"),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "c10d::reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs"),
    "c10d::alltoall_": ("all_to_all", "input_tensors"),
    "c10d::alltoall_base_": ("all_to_all", "input"),
    "c10d::send": ("send", "tensors"),
    "c10d::broadcast_": ("broadcast", "tensors"),
    "c10d::reduce_": ("reduce", "tensors"),
    "c10d::gather_": ("gather", "*input_tensors"),
    "c10d::scatter_": ("scatter", "*output_tensors"),
    "_dtensor::shard_dim_alltoall": ("all_to_all", "input"),
}
# Those that return a new tensor, which DTensor uses.
FUNCTIONAL = {
    "all_reduce": ("all_reduce", "input"),
    "all_reduce_": ("all_reduce", "input"),
    "all_reduce_coalesced": ("all_reduce", "inputs"),
    "all_reduce_coalesced_": ("all_reduce", "inputs"),
    "all_gather_into_tensor": ("all_gather", "*input"),
    "all_gather_into_tensor_out": ("all_gather", "*input"),
    "all_gather_into_tensor_coalesced": ("all_gather", "*inputs"),
    "reduce_scatter_tensor": ("reduce_scatter", "input"),
    "reduce_scatter_tensor_out": ("reduce_scatter", "input"),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", "inputs"),
    "all_to_all_single": ("all_to_all", "input"),
    "broadcast": ("broadcast", "input"),
    "broadcast_": ("broadcast", "input"),
    "isend": ("send", "tensor"),
}
OPERATORS |= {f"_c10d_functional::{name}": reading for name, reading in FUNCTIONAL.items()}


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
            self._enter(*OPERATORS[name], dict(zip(names, args)) | kwargs)
        elif name == "_c10d_functional::batch_p2p_ops":
            directions, _, _, tensors, *_ = args
            for direction, tensor in zip(directions, tensors):
                if direction == "isend":
                    self._traffic.add("send", tensor_bytes(tensor), tensor_bytes(tensor))
        return func(*args, **kwargs)

    def _enter(self, kind: str, argument: str, given: dict[str, Any]) -> None:
        group = _group_of(given)
        tensors = given[argument.lstrip("*")]
        whole = sum(tensor_bytes(tensor) for tensor in tree_leaves(tensors))
        if argument.startswith("*"):
            whole *= group.size()
        sent = ring_bytes(kind, whole, group.size())
        if kind == "all_to_all":
            sent = whole - _staying(tensors, given.get("input_split_sizes"), whole, group)
        self._traffic.add(kind, whole, sent)


def _group_of(given: dict[str, Any]) -> ProcessGroup:
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
