"""The README's picture: what each recipe leaves of a training step, on a light and a dark page.

python -m benchmarks.pictures      write docs/memory.png and docs/memory-dark.png

It is drawn from the newest recorded run of notebook 01, and narrow: a phone shows it at half its
width, and its words stay legible.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.record import Run, newest

DOCS = Path(__file__).resolve().parents[1] / "docs"
# By name: the colors of the paper, the words, and the bars.
PICTURES = {
    "memory.png": ("#ffffff", "#1f2328", "#2f6fb3"),
    "memory-dark.png": ("#0d1117", "#e6edf3", "#6aa7e8"),
}
MIB = 2**20


def draw(folder: Path = DOCS) -> list[Path]:
    """Write the pictures, and return their paths; nothing if no run was recorded."""
    run = newest("01")
    if run is None:
        return []
    written = []
    for name, (paper, ink, color) in PICTURES.items():
        figure = memory_picture(run, ink=ink, color=color)
        figure.savefig(folder / name, facecolor=paper, dpi=110, bbox_inches="tight", pad_inches=0.2)
        plt.close(figure)
        written.append(folder / name)
    return written


def rows_that_help(run: Run) -> dict[str, dict[str, Any]]:
    """The baseline, and every row that takes a tenth less memory, the largest first."""
    most = run.first["peak_bytes"]
    found = {name: row for name, row in run.rows.items() if row["peak_bytes"] < 0.9 * most}
    by_size = sorted(found, key=lambda name: found[name]["peak_bytes"], reverse=True)
    return {"full fine-tuning": run.first} | {name: found[name] for name in by_size}


def memory_picture(run: Run, *, ink: str, color: str) -> Any:
    """Bars of the measured peaks, with a tick where the arithmetic expected each."""
    rows = rows_that_help(run)
    measured = [row["peak_bytes"] / MIB for row in rows.values()]
    predicted = [row["predicted_bytes"] / MIB for row in rows.values()]
    places = range(len(rows))
    figure, axes = plt.subplots(figsize=(7, 0.42 * len(rows) + 0.9))
    bars = axes.barh(places, measured, color=color, height=0.62, label="measured")
    axes.plot(
        predicted, places, "|", color=ink, markersize=17, markeredgewidth=2, label="predicted"
    )
    labels = [f"{measured[0]:,.0f} MiB"]
    labels += [f"{mib:,.0f}   {mib / measured[0] - 1:+.0%}" for mib in measured[1:]]
    axes.bar_label(bars, labels, padding=7, color=ink, fontsize=11)
    axes.set_yticks(places, list(rows), color=ink, fontsize=11)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.2 * measured[0])
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.set_frame_on(False)
    axes.set_title(
        f"Memory of one training step: {measured[0]:,.0f} → {measured[-1]:,.0f} MiB, as predicted",
        color=ink,
        fontsize=12.5,
        fontweight="bold",
        loc="left",
        x=-0.32,
    )
    machine, cores, *_ = run.machine.split(", ")
    where = "SmolLM2-135M, peak of all tensors; all rows but the first keep checkpointing on.\n"
    where += f"Measured on {machine}, {cores}, {run.date}."
    figure.text(0.02, 0.0, where, color=ink, fontsize=8.5)
    axes.legend(frameon=False, labelcolor=ink, fontsize=10, loc="lower right")
    return figure


if __name__ == "__main__":
    for path in draw():
        print(path)
