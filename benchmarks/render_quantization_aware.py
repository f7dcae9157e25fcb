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


def grids(run: Run | None) -> str:
    """Both perplexities of each way, and what it wins back. Nothing where no run is recorded."""
    if run is None:
        return ""
    settings = run["settings"]
    untrained = run["untrained"]
    first = [f"{untrained['full']:.2f}", f"{untrained['rounded']:.2f}"]
    lines = [line(["not at all", *first, "", ""])]
    for way in settings["ways"]:
        found = _of_way(run, way)
        numbers = [_mean([each["full"] for each in found])]
        numbers.append(_mean([each["rounded"] for each in found]))
        numbers.append(percent(_of_untrained(run, way)))
        of_control = ""
        if way != CONTROL:
            of_control = percent(_of_control(run, way))
        lines.append(line([WORDS[way], *numbers, of_control]))
    notes = [
        f"{machine_line(run)}. {settings['steps']} steps of {settings['rows']} × "
        f"{settings['seq']} tokens, {_seeds(settings['seeds'])}. Perplexity of "
        f"{settings['held_out']} held-out rows; weights in {settings['weight_bits']} bits and "
        f"groups of {settings['group']}, output layer, embedding and activations in 8 bits.",
        "Won back: the part of what rounding costs that is saved. Of the untrained model it counts "
        "what the text has taught as well; the fair number is that of the model that trained as "
        "long in full precision. In brackets are the smallest and the largest of the seeds.",
    ]
    columns = ["training", "full precision", "rounded", "won back", "of the control"]
    return table(columns, lines, notes)


def block(run: Run | None) -> str:
    """The table below a sentence that says what came out."""
    if run is None:
        return ""
    cost = run["untrained"]["rounded"] / run["untrained"]["full"]
    return (
        f"Rounding takes the perplexity of the untrained model from "
        f"{run['untrained']['full']:.2f} to {run['untrained']['rounded']:.2f}, {cost:.2f}×. After "
        f"{run['settings']['steps']} steps with the rounding it is {_rounded(run, AWARE)}; after "
        f"as many without it, {_rounded(run, CONTROL)}. The difference is "
        f"{percent(_of_control(run, AWARE))} of what rounding costs the model that trained without "
        f"it.\n\n{grids(run)}"
    )


def won_back(run: Run) -> str:
    """What training with the rounding saves, for a cell."""
    return (
        f"perplexity on the grid {_rounded(run, CONTROL)} → {_rounded(run, AWARE)} after "
        f"{run['settings']['steps']} steps each: {percent(_of_control(run, AWARE))} of what "
        f"rounding costs"
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


def _of_untrained(run: Run, way: str) -> list[float]:
    return [share_won_back(run["untrained"], each["rounded"]) for each in _of_way(run, way)]


def _rounded(run: Run, way: str) -> str:
    return _mean([each["rounded"] for each in _of_way(run, way)])


def _mean(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.2f}"


def _seeds(count: int) -> str:
    if count == 1:
        return "one seed"
    return f"{count} seeds"
