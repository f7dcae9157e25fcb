"""The run of `benchmarks.quantization_aware` in the texts: a table, a block, and a cell.

Perplexities of a model as it is and on its grid. What a way wins back is a share of what rounding
costs the control, which has trained as long in full precision.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.quantization_aware import CONTROL, share_won_back
from benchmarks.record import machine_line
from benchmarks.table_text import line, table

Run = dict[str, Any]

WORDS = {
    CONTROL: "in full precision, rounded at the end",
    "aware": "with the rounding",
    "aware + teacher": "with the rounding, and a teacher",
}
AWARE = "aware"
TAUGHT = "aware + teacher"


def grids(run: Run | None) -> str:
    """Both perplexities of each way, and what it wins back against the control.

    Nothing where no run is recorded.
    """
    if run is None:
        return ""
    settings = run["settings"]
    untrained = run["untrained"]
    first = [f"{untrained['full']:.2f}", f"{untrained['rounded']:.2f}"]
    lines = [line(["no further training", *first, ""])]
    for way in settings["ways"]:
        found = _of_way(run, way)
        numbers = [_mean([each["full"] for each in found])]
        numbers.append(_mean([each["rounded"] for each in found]))
        of_control = ""
        if way != CONTROL:
            of_control = percent(_of_control(run, way))
        lines.append(line([WORDS[way], *numbers, of_control]))
    notes = [
        f"{machine_line(run)}. {settings['steps']} steps of {settings['rows']} × "
        f"{settings['seq']} tokens, {_seeds(settings['seeds'])}. Perplexity of "
        f"{settings['held_out']} held-out rows; weights in {settings['weight_bits']} bits and "
        f"groups of {settings['group']}, output layer, embedding and activations in 8 bits. "
        f"Learning rates: {settings['lr']:g} for the control, {settings['aware_lr']:g} with the "
        f"rounding.",
        "Won back: the part of what rounding costs the control, which trained as long in full "
        "precision, that training with the rounding saves.",
    ]
    if settings["seeds"] > 1:
        notes.append("In brackets are the smallest and the largest of the seeds.")
    columns = ["training", "full precision", "rounded", "won back, against the control"]
    return table(columns, lines, notes)


def block(run: Run | None) -> str:
    """The table below a sentence that says what came out."""
    if run is None:
        return ""
    untrained = run["untrained"]
    cost = untrained["rounded"] / untrained["full"]
    return (
        f"Rounding takes the perplexity of SmolLM2 from {untrained['full']:.2f} to "
        f"{untrained['rounded']:.2f}, {cost:.2f}×. Copies of it then train for "
        f"{run['settings']['steps']} steps. The control trains in full precision, and is rounded "
        f"at the end: {_full(run, CONTROL)} becomes {_rounded(run, CONTROL)}. Another copy trains "
        f"with the rounding: {_rounded(run, AWARE)}. So training with the rounding wins back "
        f"{percent(_of_control(run, AWARE))} of what rounding costs the control"
        f"{_with_a_teacher(run)}.\n\n{grids(run)}"
    )


def _with_a_teacher(run: Run) -> str:
    if TAUGHT not in run["settings"]["ways"]:
        return ""
    return f", and with a teacher besides {percent(_of_control(run, TAUGHT))}"


def won_back(run: Run) -> str:
    """What training with the rounding saves, for a cell."""
    settings = run["settings"]
    return (
        f"perplexity in {settings['weight_bits']} bits after {settings['steps']} steps: "
        f"{_rounded(run, CONTROL)} rounded at the end, {_rounded(run, AWARE)} trained with the "
        f"rounding ({_seeds(settings['seeds'])})"
    )


def percent(shares: Sequence[float]) -> str:
    """The mean, and in brackets the smallest and the largest: "61 % (58 to 64)"."""
    mean = f"{100 * statistics.fmean(shares):.0f} %"
    if len(shares) == 1:
        return mean
    return f"{mean} ({100 * min(shares):.0f} to {100 * max(shares):.0f})"


def _of_way(run: Run, way: str) -> list[dict[str, Any]]:
    return [each for each in run["runs"] if each["way"] == way]


def _of_control(run: Run, way: str) -> list[float]:
    """The share of each seed, of what rounding costs the control with the same seed."""
    controls = {each["seed"]: each for each in _of_way(run, CONTROL)}
    return [share_won_back(controls[each["seed"]], each["rounded"]) for each in _of_way(run, way)]


def _full(run: Run, way: str) -> str:
    return _mean([each["full"] for each in _of_way(run, way)])


def _rounded(run: Run, way: str) -> str:
    return _mean([each["rounded"] for each in _of_way(run, way)])


def _mean(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.2f}"


def _seeds(count: int) -> str:
    if count == 1:
        return "one seed"
    return f"{count} seeds"
