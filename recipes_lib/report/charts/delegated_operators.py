"""Which operators of an exported model the device's fast kernels take, and which stay outside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from recipes_lib.report.charts.bars import Bars, bars
from recipes_lib.report.style import LOST, RECIPE

COLORS = {"inside": RECIPE, "outside": LOST}
REST = "all others"
# Names of PyTorch that say little, or are wider than the bars.
WORDS = {
    "_native_batch_norm_legit_no_training": "batch norm",
    "hardtanh": "activation (hardtanh)",
    "addmm": "linear (addmm)",
}


def delegation_chart(exports: Mapping[str, Any], *, most: int = 12, title: str) -> Any:
    """Draw a bar per operator, and a column per export: calls inside of the backend, and outside.

    Args:
        exports: the `delegation` of exported files of one model, by name.
        most: so many operators have a bar of their own: half of them those that are outside most
            often, then the most frequent. The rest is one bar.
        title: the message.
    """
    inside = {}
    outside = {}
    calls: Counter[str] = Counter()
    worst: Counter[str] = Counter()
    for way, export in exports.items():
        inside[way] = Counter({row.name: row.inside for row in export.rows})
        outside[way] = Counter({row.name: row.outside for row in export.rows})
        calls |= inside[way] + outside[way]  # the larger one of each name
        worst |= outside[way]
    frequent = sorted(calls, key=calls.__getitem__, reverse=True)
    by_outside = sorted(frequent, key=worst.__getitem__, reverse=True)
    chosen = [name for name in by_outside[: (most + 1) // 2] if worst[name]]
    chosen += [name for name in frequent if name not in chosen][: most - len(chosen)]
    shown = [name for name in by_outside if name in chosen]
    others = [name for name in calls if name not in chosen]
    columns = []
    for way in exports:
        parts = {
            "inside": _counts(inside[way], shown, others),
            "outside": _counts(outside[way], shown, others),
        }
        sums = [sum(both) for both in zip(*parts.values(), strict=True)]
        taken = sum(inside[way].values())
        heading = f"{way}\n{taken:,} of {sum(sums):,} inside"
        labels = [str(count) for count in sums]
        columns.append(Bars(heading, parts, labels, colors=COLORS))
    names = [WORDS.get(name, name) for name in shown]
    if others:
        names.append(REST)
    return bars(names, *columns, title=title, source="counted in the graphs of the exported files")


def _counts(calls: Counter[str], shown: list[str], others: list[str]) -> list[int]:
    """The calls of each operator that is shown, and those of all others together."""
    counts = [calls[name] for name in shown]
    if others:
        counts.append(sum(calls[name] for name in others))
    return counts
