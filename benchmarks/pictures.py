"""The README's picture: what each recipe leaves of a training step, on a light and a dark page.

python -m benchmarks.pictures      write docs/memory.png

It is drawn from the newest recorded run of notebook 01.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.record import Run, newest
from recipes_lib.report.charts.bars import Bars, bars
from recipes_lib.report.charts.figure import Chart
from recipes_lib.report.style import percent

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "memory.png"
MIB = 2**20
STAIRCASE = (
    "gradient accumulation",
    "activation checkpointing",
    "checkpointing, loss in chunks",
    "step in backward",
    "16-bit AdamW states",
    "8-bit AdamW",
    "LoRA",
    "QLoRA",
    "everything combined",
)


def draw(path: Path = PICTURE) -> None:
    """Write the picture; nothing if no run was recorded."""
    run = newest("01")
    if run is not None:
        memory_picture(run).save(path)


def rows_that_help(run: Run) -> dict[str, dict[str, Any]]:
    """The baseline, and the rows of the staircase that this run has, the largest first."""
    found = {name: run.rows[name] for name in STAIRCASE if name in run.rows}
    by_size = sorted(found, key=lambda name: found[name]["peak_bytes"], reverse=True)
    return {"full fine-tuning": run.first} | {name: found[name] for name in by_size}


def memory_picture(run: Run) -> Chart:
    """Bars of the measured peaks, with a tick where each was expected."""
    rows = rows_that_help(run)
    measured = [row["peak_bytes"] / MIB for row in rows.values()]
    predicted = [row["predicted_bytes"] / MIB for row in rows.values()]
    labels = [f"{measured[0]:,.0f} MiB"]
    labels += [f"{mib:,.0f}   {percent(mib / measured[0] - 1)}" for mib in measured[1:]]
    machine, cores, *_ = run.machine.split(", ")
    where = "SmolLM2-135M, peak of all tensors; most rows keep checkpoints and a loss in chunks.\n"
    where += f"Measured on {machine}, {cores}, {run.date}."
    return bars(
        list(rows),
        Bars("MiB", measured, labels, marks=predicted),
        title=f"One training step: {measured[0]:,.0f} → {measured[-1]:,.0f} MiB, as predicted",
        source=where,
    )


if __name__ == "__main__":
    draw()
