"""The run of `benchmarks.depths` in the texts: a table, the block of a notebook, and a cell.

All losses are held-out, in nats per byte, of small models that read bytes.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.differences import spread, verdict
from benchmarks.record import machine_line
from benchmarks.table_text import line, table

Run = dict[str, Any]


def depths(run: Run | None) -> str:
    """Loss and time of each depth at equal weights. Nothing where no run is recorded."""
    if run is None:
        return ""
    lines = []
    first = run["rows"][0]
    for row in run["rows"]:
        change = ["", ""]
        if row is not first:
            change = [spread(row["beyond_first"]), verdict(row["beyond_first"])]
        loss = f"{statistics.fmean(row['losses']):.3f}"
        shape = f"{row['layers']} × {row['hidden']}"
        time = f"{row['seconds_per_token'] / first['seconds_per_token']:.1f}×"
        lines.append(line([shape, f"{row['parameters']:,}", loss, *change, time]))
    sizes = run["sizes"]
    notes = [
        f"{machine_line(run)}. {len(run['seeds'])} seeds, {run['steps']} steps of "
        f"{sizes['rows']} × {sizes['seq_len']} bytes.",
        "Held-out loss: the mean over the seeds, in nats per byte. The difference is to the first "
        "line with the same seed; in brackets are the smallest and the largest. It decides only if "
        "all seeds agree.",
        "Time: one token in eager mode on one thread, to that of the first line.",
    ]
    columns = ["blocks × width", "weights", "held-out loss", "difference", "verdict", "time"]
    return table(columns, lines, notes)


def block(run: Run | None) -> str:
    """The table with a sentence before it."""
    if run is None:
        return ""
    begin = f"The recorded comparison trains each depth for {run['steps']} steps:"
    return f"{begin}\n\n{depths(run)}"


def deepest(run: Run) -> str:
    """The best depth and what it is worth, for a cell."""
    best = min(run["rows"], key=lambda row: statistics.fmean(row["losses"]))
    beyond = best["beyond_first"]
    if best is run["rows"][0]:
        return f"loss of a tiny model: no depth beats {best['layers']} blocks"
    return (
        f"loss of a tiny model with {best['layers']} blocks in place of "
        f"{run['rows'][0]['layers']}: {spread(beyond)} nats per byte: {verdict(beyond)}"
    )
