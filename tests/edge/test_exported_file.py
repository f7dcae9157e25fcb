import operator
from types import SimpleNamespace

import pytest
import torch

from recipes_lib.edge._exported_file import (
    Delegation,
    ExportedFile,
    OperatorRow,
    read_delegation,
    require_delegated,
)

CONVOLUTION = OperatorRow("convolution", inside=52, outside=0)
POOLING = OperatorRow("avg_pool2d", inside=0, outside=1)
COPY = OperatorRow("expand_copy", inside=1, outside=3)


def test_share_and_what_is_outside():
    delegation = Delegation(rows=(POOLING, COPY, CONVOLUTION), subgraphs=2)
    assert (delegation.inside_count, delegation.outside_count) == (53, 4)
    assert delegation.share == 53 / 57
    assert delegation.outside() == (COPY, POOLING)
    assert delegation.row("convolution") == CONVOLUTION
    assert delegation.row("linear") == OperatorRow("linear", inside=0, outside=0)


def test_a_graph_without_operators():
    assert Delegation(rows=(), subgraphs=0).share == 0


def test_everything_heavy_is_delegated():
    require_delegated(Delegation(rows=(CONVOLUTION, COPY), subgraphs=1))


def test_what_stayed_outside_is_named():
    delegation = Delegation(rows=(CONVOLUTION, POOLING), subgraphs=2)
    with pytest.raises(ValueError, match=r"outside of the backend: 1 × avg_pool2d\. .*Adaptive"):
        require_delegated(delegation)
    require_delegated(delegation, operators=["convolution"])


@pytest.mark.parametrize("name", ["_adaptive_avg_pool2d", "max_pool3d_with_indices", "baddbmm"])
def test_slow_operators_of_other_names_are_named(name):
    """nn.AdaptiveAvgPool2d(3) stayed outside without a word."""
    rows = (CONVOLUTION, OperatorRow(name, inside=0, outside=1))
    with pytest.raises(ValueError, match=f"1 × {name}"):
        require_delegated(Delegation(rows=rows, subgraphs=2))


def test_nothing_is_delegated():
    with pytest.raises(ValueError, match="nothing is delegated: the model has none of linear"):
        require_delegated(Delegation(rows=(CONVOLUTION,), subgraphs=1), operators=["linear"])
    with pytest.raises(ValueError, match="give a list"):
        require_delegated(Delegation(rows=(), subgraphs=0), operators="linear")


def test_a_lowered_graph_is_counted(tmp_path):
    """A graph as ExecuTorch leaves it, without ExecuTorch: a part is behind `get_attr`."""

    def calls(*targets):
        return [SimpleNamespace(op="call_function", name="call", target=t) for t in targets]

    aten = torch.ops.aten
    inner = calls(aten.convolution.default, aten.hardtanh.default, aten.convolution.default)
    outer = [
        SimpleNamespace(op="placeholder", name="x", target="x"),
        SimpleNamespace(op="get_attr", name="lowered_module_0", target="lowered_module_0"),
        *calls("executorch_call_delegate", operator.getitem, aten.add.Tensor, aten.mean.dim),
    ]
    part = SimpleNamespace(original_module=SimpleNamespace(graph=SimpleNamespace(nodes=inner)))
    module = SimpleNamespace(graph=SimpleNamespace(nodes=outer), lowered_module_0=part)
    delegation = read_delegation(module)
    assert delegation.subgraphs == 1
    assert delegation.rows == (
        OperatorRow("add", inside=0, outside=1),
        OperatorRow("convolution", inside=2, outside=0),
        OperatorRow("hardtanh", inside=1, outside=0),
        OperatorRow("mean", inside=0, outside=1),
    )


def test_what_is_no_graph():
    with pytest.raises(ValueError, match="graph_module is of type str: give the graph module"):
        read_delegation("model.pte")


def test_size_of_a_file(tmp_path):
    assert ExportedFile(tmp_path / "m.pte", bytes=3 * 2**19, seconds=1.0).mebibytes == 1.5
