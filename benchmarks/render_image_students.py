"""The run of `benchmarks.image_students` in the texts: a table, the block of a notebook, a cell.

Answers are counted in held-out images that are read wrong. Times are those of one image on one
thread.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks import turns
from benchmarks.differences import spread, verdict
from benchmarks.image_students import ALONE, TAUGHT
from benchmarks.record import machine_line
from benchmarks.table_text import line, table

Run = dict[str, Any]

# --- tables -------------------------------------------------------------------------------------


def students(run: Run | None) -> str:
    """Wrong answers of each network and seed. Nothing where no run is recorded."""
    if run is None:
        return ""
    settings = run["settings"]
    seeds = [row["seed"] for row in run["seeds"]]
    wrong = [row["teacher"] for row in run["seeds"]]
    lines = [_line("teacher", f"{settings['train']:,} labels", wrong, ["", ""])]
    for kind, name, images in (
        ("student", "student", settings["train"]),
        ("few", "small student", settings["few"]),
    ):
        beyond = _beyond_alone(run, kind)
        change = [spread(beyond, digits=0), verdict(beyond)]
        lines.append(_line(name, f"{images:,} labels", _wrong(run, kind, ALONE), ["", ""]))
        lines.append(_line(name, "the same, and the teacher", _wrong(run, kind, TAUGHT), change))
    notes = [
        f"{machine_line(run)}. Wrong answers, of {settings['test']:,} digits that no network has "
        f"learned from. The difference is to the labels alone with the same seed; in brackets are "
        f"the smallest and the largest. It decides only if all {len(seeds)} seeds agree on the "
        f"sign. All seeds have the same images. The widths are {settings['width']} and "
        f"{settings['few_width']}, and the teacher has learned from {settings['train']:,} images "
        f"in both cases."
    ]
    columns = ["network", "learned from", *[f"seed {seed}" for seed in seeds]]
    return table([*columns, "mean", "difference", "verdict"], lines, notes, names=2)


def _line(network: str, learned: str, wrong: list[int], change: list[str]) -> str:
    each = [str(count) for count in wrong]
    return line([network, learned, *each, f"{statistics.fmean(wrong):.0f}", *change])


# --- a notebook and a cell ------------------------------------------------------------------------


def block(run: Run | None) -> str:
    """The same table, below a sentence that says what came out."""
    if run is None:
        return ""
    work = run["times"]["multiply_adds"]
    ratio = work["teacher"] / work["student"]
    return f"{in_words(run)} It has {ratio:.1f} times fewer multiply-adds.\n\n{students(run)}"


def in_words(run: Run) -> str:
    """What the student keeps of its teacher, and how fast it is."""
    kept = _kept(run)
    milliseconds = run["times"]["milliseconds"]
    speed = turns.in_words(turns.ratios(milliseconds["teacher"], milliseconds["student"]))
    return (
        f"Over {len(kept)} seeds the student gives {statistics.fmean(kept):.1%} "
        f"({min(kept):.1%} to {max(kept):.1%}) as many right answers as its teacher, and in "
        f"ExecuTorch it is {speed} as fast."
    )


def few_images(run: Run) -> str:
    """What the teacher is worth to a small student with few images, for a cell."""
    beyond = _beyond_alone(run, "few")
    settings = run["settings"]
    return (
        f"{settings['few']:,} images: {statistics.fmean(_wrong(run, 'few', ALONE)):.0f} of "
        f"{settings['test']:,} wrong, with a teacher {spread(beyond, digits=0)}: "
        f"{verdict(beyond)}"
    )


# --- what they share ------------------------------------------------------------------------------


def _wrong(run: Run, kind: str, way: str) -> list[int]:
    """Wrong answers of each seed."""
    return [row[kind][way] for row in run["seeds"]]


def _beyond_alone(run: Run, kind: str) -> list[int]:
    """Wrong answers with the teacher, less those of the labels alone with the same seed."""
    pairs = zip(_wrong(run, kind, TAUGHT), _wrong(run, kind, ALONE))
    return [taught - alone for taught, alone in pairs]


def _kept(run: Run) -> list[float]:
    """Right answers of the taught student over those of its teacher, seed by seed."""
    test = run["settings"]["test"]
    return [(test - row["student"][TAUGHT]) / (test - row["teacher"]) for row in run["seeds"]]
