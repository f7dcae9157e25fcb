"""Delegated operators: which of a model's operators a backend has taken, and which stay outside.

A backend is a library of fast kernels for one kind of device, such as XNNPACK for CPUs. An export
looks for parts of the model that the backend knows, and hands them over: they are delegated. What
it does not know stays outside and runs on portable kernels. These are plain loops, and a single
one of them can take longer than all the rest of a model.

    with XNNPACK      [convolution, clamp, convolution, add, linear]         all inside
    with a stranger   [convolution, clamp] avg_pool2d [convolution, linear]  1 outside
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# Outside of a backend, one of these is what takes the time.
PRODUCTS = ("linear", "addmm", "mm", "bmm", "baddbmm")
POOLINGS = (
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "_adaptive_avg_pool2d",
    "_adaptive_avg_pool3d",
    "adaptive_max_pool2d",
    "max_pool2d",
    "max_pool2d_with_indices",
    "max_pool3d_with_indices",
)
HEAVY_OPERATORS = ("convolution", "conv2d", *PRODUCTS, *POOLINGS)


@dataclass(frozen=True)
class OperatorRow:
    """How often one operator stands inside of the delegated subgraphs, and how often outside."""

    name: str
    inside: int
    outside: int


@dataclass(frozen=True)
class Delegation:
    """Which operators of a model a backend has taken, as rows for a table or a chart."""

    rows: tuple[OperatorRow, ...]

    @property
    def share(self) -> float:
        """The part of all operators that is delegated, from 0 to 1."""
        inside = sum(row.inside for row in self.rows)
        outside = sum(row.outside for row in self.rows)
        return inside / max(1, inside + outside)

    def outside(self) -> tuple[OperatorRow, ...]:
        """The operators of which something stayed outside of the backend; most frequent first."""
        rows = [row for row in self.rows if row.outside]
        return tuple(sorted(rows, key=lambda row: (-row.outside, row.name)))

    def row(self, name: str) -> OperatorRow:
        for row in self.rows:
            if row.name == name:
                return row
        return OperatorRow(name, inside=0, outside=0)


def read_delegation(graph_module: Any) -> Delegation:
    """Count the operators of a lowered graph, inside and outside of its delegated subgraphs."""
    inside = Counter()
    for node in graph_module.graph.nodes:
        if node.op == "get_attr" and node.name.startswith("lowered_module_"):
            part = getattr(graph_module, node.name)
            inside.update(_operator_names(part.original_module.graph.nodes))
    outside = Counter(_operator_names(graph_module.graph.nodes))
    names = sorted(inside | outside)
    rows = [OperatorRow(name, inside[name], outside[name]) for name in names]
    return Delegation(tuple(rows))


def _operator_names(nodes: Iterable[Any]) -> list[str]:
    """The operators to count, without what only takes results apart.

    `aten::convolution` is "convolution"; other families keep their first name.
    """
    names = []
    for node in nodes:
        if node.op == "call_function" and hasattr(node.target, "_schema"):
            name = node.target._schema.name
            names.append(name.removeprefix("aten::").replace("::", "."))
    return names


def require_delegated(
    delegation: Delegation, *, operators: Iterable[str] = HEAVY_OPERATORS
) -> None:
    """Every one of `operators` that the model has is delegated, and there is at least one.

    Nothing else tells: a model whose slowest operator stayed outside gives the right answers, late.
    """
    rows = [delegation.row(name) for name in operators]
    left = [f"{row.outside} × {row.name}" for row in rows if row.outside]
    if left:
        raise ValueError(
            f"these operators stayed outside of the backend: {', '.join(left)}. They run on slow "
            f"portable kernels. Replace them in the model by ones that the backend knows: for a "
            f"pooling nn.AdaptiveAvgPool2d(1) over the whole image, or nn.AvgPool2d(k) over windows"
        )
    if not any(row.inside for row in rows):
        names = ", ".join(row.name for row in rows)
        raise ValueError(f"nothing is delegated: the model has none of {names} in a subgraph")
