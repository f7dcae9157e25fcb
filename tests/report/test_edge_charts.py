"""The charts of devices: which operators are delegated, and how fast which program is."""

from types import SimpleNamespace

import pytest

from recipes_lib.report.delegation_chart import delegation_chart
from recipes_lib.report.runtime_chart import Runtime, runtime_chart
from tests.drawn import texts


def export(*rows):
    operators = [SimpleNamespace(name=name, inside=i, outside=o) for name, i, o in rows]
    return SimpleNamespace(rows=tuple(operators))


def test_delegation_before_and_after():
    """Catches rows that are matched by place: the two exports list their operators differently."""
    before = export(("mean", 0, 3), ("linear", 0, 7))
    after = export(("linear", 7, 0), ("mean", 1, 2))
    figure = delegation_chart({"portable": before, "XNNPACK": after})
    left, right = figure.axes
    assert left.get_title(loc="left") == "portable:\n0 of 10 inside"
    assert right.get_title(loc="left") == "XNNPACK:\n8 of 10 inside"
    widths = [patch.get_width() for patch in right.patches]
    assert widths == [7, 1, 0, 2]  # inside of linear and mean, then outside of both


def test_rare_operators_are_one_bar():
    many = export(*((f"op{number}", number, 0) for number in range(1, 8)))
    (axes,) = delegation_chart({"all": many}, most=3).axes
    assert [patch.get_width() for patch in axes.patches][:4] == [7, 6, 5, 1 + 2 + 3 + 4]


def test_what_is_outside_has_a_name_and_is_on_top():
    """Catches red calls in the bar of the rest, and blue ones that lose all their bars to red."""
    frequent = [(f"fast{number}", 90 - number, 0) for number in range(4)]
    rows = export(*frequent, ("hardtanh", 0, 2), ("slice_copy", 1, 5), ("view_copy", 0, 1))
    (axes,) = delegation_chart({"all": rows}, most=4).axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["slice_copy", "activation (hardtanh)", "fast0", "fast1", "all others"]


def test_runtimes_have_time_and_size():
    figure = runtime_chart(
        [
            Runtime("eager", 0.0021, 2_900_000, 0.0019, 0.0024),
            Runtime("ExecuTorch", 0.00022, 2_810_000),
        ]
    )
    (axes,) = figure.axes
    assert "2.10 ms · 2.90 MB" in texts(axes)
    assert "0.22 ms · 2.81 MB" in texts(axes)


def test_bad_input():
    with pytest.raises(ValueError, match="above 0"):
        Runtime("x", 0.0, 1)
    with pytest.raises(ValueError, match="nothing to draw"):
        runtime_chart([])
