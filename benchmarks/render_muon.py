"""The study of `benchmarks.muon` in the texts: a table, the block of notebook 05, and a cell.

All losses are held-out, in nats per target.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.muon import OPTIMIZERS
from benchmarks.record import machine_line
from benchmarks.table_text import line, table

Run = dict[str, Any]


def losses_of(run: Run, optimizer: str, rate: float) -> list[float]:
    """The loss of each seed."""
    return [
        each["loss"]
        for each in run["runs"]
        if each["optimizer"] == optimizer and each["lr"] == rate
    ]


def study(run: Run | None) -> str:
    """The losses of all seeds, by optimizer and learning rate. Nothing where none is recorded."""
    if run is None:
        return ""
    lines = []
    for rate in run["settings"]["rates"]:
        for optimizer in OPTIMIZERS:
            losses = losses_of(run, optimizer, rate)
            seeds = " ".join(f"{loss:.3f}" for loss in losses)
            lines.append(line([optimizer, f"{rate:.0e}", seeds, f"{statistics.fmean(losses):.3f}"]))
    settings = run["settings"]
    notes = [
        f"{machine_line(run)}. {settings['steps']} steps of {settings['rows']} rows, of at most "
        f"{settings['tokens']} tokens.",
        f"Held-out loss on {settings['held_out']} rows, one number per seed; before: "
        f"{run['before']:.3f}.",
    ]
    return table(["optimizer", "learning rate", "held-out loss", "mean"], lines, notes)


def block(run: Run | None) -> str:
    """The table, and a sentence about which optimizer ends lower."""
    if run is None:
        return ""
    return f"{study(run)}\n\n{verdict(run)}"


def verdict(run: Run) -> str:
    """Which optimizer ends lower with every seed, each at its better learning rate."""
    ends = {name: best(run, name) for name in OPTIMIZERS}
    differences = [muon - adamw for muon, adamw in zip(ends["Muon"], ends["AdamW"], strict=True)]
    widest = f"{min(differences):+.3f} to {max(differences):+.3f}"
    begin = f"Each at the better of these rates, Muon's loss minus AdamW's is {widest}: "
    if min(differences) > 0:
        return f"{begin}AdamW ends lower with every seed, after as few steps as these."
    if max(differences) < 0:
        return f"{begin}Muon ends lower with every seed, after as few steps as these."
    return f"{begin}the seeds do not agree."


def best(run: Run, optimizer: str) -> list[float]:
    """The losses at the learning rate whose mean is lowest."""
    by_rate = [losses_of(run, optimizer, rate) for rate in run["settings"]["rates"]]
    return min(by_rate, key=statistics.fmean)


def in_words(run: Run) -> str:
    """The losses of all seeds, for a cell."""
    words = []
    for name in reversed(OPTIMIZERS):
        losses = best(run, name)
        words.append(f"{name} {min(losses):.2f}–{max(losses):.2f}")
    return f"loss of {run['settings']['seeds']} seeds: {', '.join(words)}"
