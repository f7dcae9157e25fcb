"""The run of `benchmarks.distillation` in the texts: a table, a block of a notebook, and a cell."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.differences import spread, verdict
from benchmarks.record import machine_line
from benchmarks.table_text import line, table

Run = dict[str, Any]

# What a student learned from, by the name of the way.
WORDS = {
    "labels": "the text alone",
    "teacher": "the text and its teacher",
    "teacher + hidden": "the same, and its teacher's hidden states",
}
ALONE = "labels"
TAUGHT = "teacher"

# --- tables -------------------------------------------------------------------------------------


def students(run: Run | None) -> str:
    """The held-out losses of each way and seed. Nothing where no run is recorded."""
    if run is None:
        return ""
    settings = run["settings"]
    seeds = list(range(settings["seeds"]))
    empty = [""] * len(seeds)
    lines = [line(["nothing yet", *empty, f"{run['untrained']:.3f}", "", ""])]
    for way in settings["ways"]:
        losses = _losses(run, way)
        change = ["", ""]
        if way != ALONE and ALONE in settings["ways"]:
            change = [spread(_beyond_alone(run, way)), verdict(_beyond_alone(run, way))]
        each = [f"{loss:.3f}" for loss in losses]
        lines.append(line([WORDS[way], *each, f"{statistics.fmean(losses):.3f}", *change]))
    lines.append(line(["*the teacher itself*", *empty, f"{run['teacher']:.3f}", "", ""]))
    notes = [
        f"{machine_line(run)}. {_student(run)}. {_training(run)}",
        f"Held-out loss in nats per token, on {settings['held_out']} rows of other modules. The "
        f"difference is to the text alone with the same seed; in brackets are the smallest and "
        f"the largest. A verdict is better or worse only if all {len(seeds)} seeds agree on the "
        f"sign.",
        _price(run),
    ]
    columns = ["the student learned from", *[f"seed {seed}" for seed in seeds]]
    return table([*columns, "mean", "difference", "verdict"], lines, notes)


# --- a notebook ---------------------------------------------------------------------------------


def block(run: Run | None) -> str:
    """The same table, below a sentence that says what came out."""
    if run is None:
        return ""
    return f"{in_words(run)}\n\n{students(run)}"


def in_words(run: Run) -> str:
    """The losses with and without a teacher, and what the seeds say of them."""
    beyond = _beyond_alone(run, TAUGHT)
    says = {
        "better": f"the student with its teacher is better in all {len(beyond)} seeds",
        "worse": f"the student with its teacher is worse in all {len(beyond)} seeds",
        "undecided": "the seeds do not agree which of the two is better",
        "too few seeds": f"{len(beyond)} of each is too few to say which is better",
    }
    return (
        f"After {run['settings']['steps']} steps each the held-out loss is "
        f"{statistics.fmean(_losses(run, ALONE)):.3f} from the text alone and "
        f"{statistics.fmean(_losses(run, TAUGHT)):.3f} with the teacher: a difference of "
        f"{spread(beyond)} nats per token, and {says[verdict(beyond)]}. The student began with "
        f"{run['untrained']:.3f}, and its teacher has {run['teacher']:.3f}."
    )


# --- cells --------------------------------------------------------------------------------------


def distillation(run: Run) -> str:
    beyond = _beyond_alone(run, TAUGHT)
    return (
        f"loss {statistics.fmean(_losses(run, ALONE)):.3f} on text alone, with its teacher "
        f"{spread(beyond)}: {verdict(beyond)}, after {run['settings']['steps']} steps each"
    )


# --- what they share ------------------------------------------------------------------------------


def _losses(run: Run, way: str) -> list[float]:
    """The last held-out loss of each seed, in the order of the seeds."""
    found = {each["seed"]: each["loss"] for each in run["runs"] if each["way"] == way}
    return [found[seed] for seed in range(run["settings"]["seeds"])]


def _beyond_alone(run: Run, way: str) -> list[float]:
    """Each loss, less that of the text alone with the same seed."""
    return [loss - alone for loss, alone in zip(_losses(run, way), _losses(run, ALONE))]


def _student(run: Run) -> str:
    sizes = {name: size / 1e6 for name, size in run["weight_bytes"].items()}
    ratio = run["decode"]["teacher"] / run["decode"]["student"]
    return (
        f"The student has {len(run['blocks'])} of {len(run['influence'])} blocks and "
        f"{sizes['student']:,.0f} of {sizes['teacher']:,.0f} MB, and `generate` writes with it "
        f"{ratio:.2f}× as fast"
    )


def _training(run: Run) -> str:
    settings = run["settings"]
    return (
        f"It trains for {settings['steps']} steps of {settings['rows']} rows of {settings['seq']} "
        f"tokens."
    )


def _price(run: Run) -> str:
    """How much longer a step takes with a teacher."""
    seconds = {}
    for way in (ALONE, TAUGHT):
        steps = [each["seconds_per_step"] for each in run["runs"] if each["way"] == way]
        seconds[way] = statistics.median(steps)
    return (
        f"A step with the teacher takes {seconds[TAUGHT] / seconds[ALONE]:.2f}× as long as one "
        f"on the text alone; the losses are compared at equal steps."
    )
