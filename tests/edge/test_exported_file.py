"""Which operators a backend has taken."""

import operator
from types import SimpleNamespace

import pytest
import torch

from recipes_lib.edge._exported_file import (
    Delegation,
    OperatorRow,
    read_delegation,
    require_delegated,
    whole_or_none,
)

CONVOLUTION = OperatorRow("convolution", inside=52, outside=0)
POOLING = OperatorRow("avg_pool2d", inside=0, outside=1)
COPY = OperatorRow("expand_copy", inside=1, outside=3)


def test_share_and_what_is_outside():
    """A share of kinds in place of calls; the most frequent one not first."""
    delegation = Delegation(rows=(POOLING, COPY, CONVOLUTION), subgraphs=2)
    assert delegation.share == 53 / 57
    assert delegation.outside() == (COPY, POOLING)
    assert delegation.row("linear") == OperatorRow("linear", inside=0, outside=0)
    assert Delegation(rows=(), subgraphs=0).share == 0


def test_what_stayed_outside_is_named():
    """A light operator may stay outside; a heavy one, or everything, may not."""
    require_delegated(Delegation(rows=(CONVOLUTION, COPY), subgraphs=1))
    delegation = Delegation(rows=(CONVOLUTION, POOLING), subgraphs=2)
    with pytest.raises(ValueError, match=r"outside of the backend: 1 × avg_pool2d\. .*Adaptive"):
        require_delegated(delegation)
    require_delegated(delegation, operators=["convolution"])
    with pytest.raises(ValueError, match="nothing is delegated: the model has none of linear"):
        require_delegated(delegation, operators=["linear"])


def test_a_lowered_graph_is_counted():
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


def test_an_export_that_is_cut_leaves_nothing(tmp_path):
    """Half a file under the name of a whole one, or the old file gone."""
    path = tmp_path / "deep" / "model.pte"
    with whole_or_none(path) as unfinished:
        unfinished.write_text("whole")
    with pytest.raises(KeyboardInterrupt), whole_or_none(path) as unfinished:
        unfinished.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "whole"
    assert list(path.parent.iterdir()) == [path]
