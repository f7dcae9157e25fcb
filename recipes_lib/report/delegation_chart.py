"""Which operators of an exported model the device's fast kernels take, and which stay outside.

    delegation_chart({"portable": before, "XNNPACK": after})      # core.exported_file.Delegation

A row per operator. What a backend takes over runs in its kernels; every other operator runs in a
plain loop of the runtime, which may be a hundred times as slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from recipes_lib.report.bars import BAR, Slots, without_scale, write_beside
from recipes_lib.report.figure import WIDTH, Key, blank_figure, muted, page
from recipes_lib.report.style import RECIPE, TERMS

OUTSIDE = TERMS["gradients"]  # red: what to look at
ROOM = 1.35  # of the longest bar: its number stands beside it
# Names of PyTorch that say little, or are wider than the bars.
WORDS = {
    "_native_batch_norm_legit_no_training": "batch norm",
    "hardtanh": "activation (hardtanh)",
    "addmm": "linear (addmm)",
}


class Operator(Protocol):
    """An operator of the graph, and how often it is inside and outside of the backend."""

    name: str
    inside: int
    outside: int


class Delegated(Protocol):
    """The operators of one exported model."""

    rows: tuple[Operator, ...]


@page()
def delegation_chart(
    exports: Mapping[str, Delegated],
    *,
    most: int = 12,
    title: str | None = None,
    source: str = "counted in the graphs of the exported files",
) -> Any:
    """Draw a bar per operator and export: calls inside of the backend, and calls outside.

    Args:
        exports: by name, side by side; all of the same model.
        most: so many operators have a bar of their own; the rest is one bar. Half of these places
            go to what is outside most often, the others to the most frequent. What is outside most
            often is on top.
    Raises ValueError if there is nothing to draw.
    """
    counts = {name: _counts(export) for name, export in exports.items()}
    operators = _chosen(counts, most)
    rows = [{"name": WORDS.get(name, name)} for name in operators]
    slots = Slots(rows)
    figure, axes = blank_figure(
        rows,
        (WIDTH, slots.inches),
        title=title or "What the backend takes over",
        source=source,
        key=[Key("inside of the backend", RECIPE), Key("outside", OUTSIDE)],
        bars=True,
        ncols=len(counts),
        squeeze=False,
    )
    drawn = {name: _summed(of_export, operators) for name, of_export in counts.items()}
    largest = max(sum(both) for of_export in drawn.values() for both in of_export)
    for column, (name, of_export) in zip(axes[0], counts.items(), strict=True):
        _draw_export(column, slots, drawn[name])
        total = sum(inside for inside, _ in of_export.values())
        calls = sum(sum(both) for both in of_export.values())
        without_scale(column, f"{name}:\n{total:,} of {calls:,} inside")
        column.set_xlim(0, ROOM * largest)
    slots.write_names(axes[0][0])
    return figure


REST = "all others"


def _counts(export: Delegated) -> dict[str, tuple[int, int]]:
    return {row.name: (row.inside, row.outside) for row in export.rows}


def _chosen(counts: Mapping[str, dict[str, tuple[int, int]]], most: int) -> list[str]:
    """The operators with a bar of their own, and `REST` if there are more."""
    calls: dict[str, int] = {}
    outside: dict[str, int] = {}
    for of_export in counts.values():
        for name, both in of_export.items():
            calls[name] = max(calls.get(name, 0), sum(both))
            outside[name] = max(outside.get(name, 0), both[1])
    frequent = sorted(calls, key=calls.__getitem__, reverse=True)
    stay_outside = sorted(frequent, key=outside.__getitem__, reverse=True)
    # Red is what to look at, so it has names, and is not a part of the rest.
    chosen = [name for name in stay_outside[: (most + 1) // 2] if outside[name]]
    for name in frequent:
        if len(chosen) < most and name not in chosen:
            chosen.append(name)
    drawn = [name for name in stay_outside if name in chosen]
    if len(calls) > most:
        return [*drawn, REST]
    return drawn


def _summed(counts: dict[str, tuple[int, int]], operators: list[str]) -> list[tuple[int, int]]:
    """Inside and outside of each operator that is drawn; the last one may be all others."""
    drawn = [counts.get(name, (0, 0)) for name in operators]
    if operators[-1] == REST:
        others = [both for name, both in counts.items() if name not in operators]
        drawn[-1] = (sum(inside for inside, _ in others), sum(outside for _, outside in others))
    return drawn


def _draw_export(axes: Any, slots: Slots, counts: list[tuple[int, int]]) -> None:
    inside = [both[0] for both in counts]
    outside = [both[1] for both in counts]
    axes.barh(slots.places, inside, height=BAR, color=RECIPE)
    axes.barh(slots.places, outside, left=inside, height=BAR, color=OUTSIDE)
    for place, both in zip(slots.places, counts, strict=True):
        if sum(both) == 0:
            write_beside(axes, "none", 0, place, fontsize=9, color=muted())
            continue
        write_beside(axes, f"{sum(both)}", sum(both), place, fontsize=9)
