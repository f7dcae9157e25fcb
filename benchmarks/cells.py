"""A number inside a line of a text: a row of a ladder, a fact beside it, or a run of its own.

    <!--m 01 QLoRA-->                a row of the ladder of notebook 01
    <!--m 05 packing-->              a fact that notebook 05 notes; see `facts`
    <!--m 03 distillation-->         a run of its own, which takes too long for notebook 03

A cell without a recorded run is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import (
    arithmetic,
    render_architecture,
    render_depths,
    render_distillation,
    render_edge,
    render_image_students,
    render_int8_images,
    render_muon,
    render_peers,
    render_quantization_aware,
    sentences,
)
from benchmarks.facts import FACTS
from benchmarks.record import LADDERS, RESULTS, newest, plain_name
from recipes_lib.report.style import MIB, percent

Run = dict[str, Any]

NO_BREAK = "\u00a0"  # a space at which no line ends
DEVICES = {"cpu": "cpu", "gpu": "cuda"}  # the name in a marker, and torch's

# --- a cell -------------------------------------------------------------------------------------


def cell(number: str, name: str, *, folder: Path = RESULTS) -> str:
    """What a marker of this notebook and name shows: first on CPU, then on GPU.

    Nothing where no run has it.
    """
    if (number, name) == ("doctor", "8b"):
        return arithmetic.doctor_line()
    shown = []
    for device in DEVICES.values():
        text = cell_on(device, number, name, folder=folder)
        if text:
            shown.append(text)
    return "; ".join(shown)


def cell_on(device: str, number: str, name: str, *, folder: Path = RESULTS) -> str:
    """The part of a cell that one kind of machine measured, or nothing."""
    latest = newest(LADDERS[number], device, folder=folder)
    if name in OWN_RUNS:
        part, words = OWN_RUNS[name]
        run = newest(part, device, folder=folder)
        return said(words, run, latest, same=("name", "native_bf16"))  # of any day
    if name in FACTS:
        return said(partial(fact, name=name), latest, latest)
    run = newest(LADDERS[number], device, row=name, folder=folder)
    return said(partial(WORDS.get(number, row_in_bytes), name=name), run, latest)


def said(
    words: Callable[[Run], str],
    run: Run | None,
    latest: Run | None,
    *,
    same: Sequence[str] = ("name", "native_bf16", "date"),
) -> str:
    """What `words` say of a run, behind its machine; nothing where it is not recorded.

    Args:
        latest: the newest ladder on this kind of machine, of which the texts speak otherwise.
        same: what a run has in common with `latest` if its machine needs no longer name.
    """
    if run is None:
        return ""
    text = words(run)
    if not text:  # the run is older than what the text asks for
        return ""
    known = latest is None or all(run[key] == latest[key] for key in same)
    return f"{machine_name(run, known=known)}:{NO_BREAK}{text}"


def machine_name(run: Run, *, known: bool) -> str:
    """The machine of a run, as short as a cell needs it: a GPU by its name, a CPU by its kind.

    Args:
        known: it is the machine of which the texts speak otherwise.
    """
    if run["device"] != "cpu":
        return run["name"]
    if known:
        return "CPU"
    if run["native_bf16"]:
        return "CPU with native bf16"
    return "CPU without native bf16"


# --- rows and facts of a ladder -----------------------------------------------------------------


def fact(run: Run, name: str) -> str:
    """What the notebook noted under this name."""
    return FACTS[name](run["facts"])


def row_of(run: Run, name: str) -> dict[str, Any]:
    """The row of a run that has this name."""
    rows = {plain_name(row["name"]): row for row in run["rows"]}
    return rows[plain_name(name)]


def row_in_bytes(run: Run, name: str) -> str:
    """A row against the baseline of its run: memory and time."""
    first = run["rows"][0]
    row = row_of(run, name)
    memory = percent(row["peak_bytes"] / first["peak_bytes"] - 1)
    return unbroken([f"{memory} peak", f"{sentences.time_in_words(row, first)} time"])


def row_in_tokens(run: Run, name: str) -> str:
    """A row against the baseline of its run: length and time."""
    first = run["rows"][0]
    row = row_of(run, name)
    length = row["tokens"] / first["tokens"]
    time = sentences.time_of_length(row, first)
    return unbroken([f"{length:.1f}× the length", f"{time} time per token"])


def row_in_speed(run: Run, name: str) -> str:
    """A row against the first of its group: speed, and where both are known, perplexity."""
    row = row_of(run, name)
    first = next(each for each in run["rows"] if each["group"] == row["group"])
    parts = [f"{sentences.speed_in_words(row, first)} as fast"]
    if None not in (row["perplexity"], first["perplexity"]):
        # A perplexity may change by less than a whole per cent, and that is worth knowing.
        parts.append(f"perplexity {row['perplexity'] / first['perplexity'] - 1:+.1%}")
    if row["agreement"] is not None:
        parts.append(f"agrees at {row['agreement']:.0%}")
    return unbroken(parts)


def row_in_ranks(run: Run, name: str) -> str:
    """A row against one process: what a rank keeps, and how far the losses are off."""
    first = run["rows"][0]
    row = row_of(run, name)
    kept = percent(sentences.kept_bytes(row) / sentences.kept_bytes(first) - 1)
    return unbroken(
        [
            f"{kept} per rank on {row['ranks']}",
            f"sends {row['sent_bytes'] / MIB:.0f} MiB",
            f"losses to {row['loss_difference']:.0e}",
        ]
    )


def row_in_file(run: Run, name: str) -> str:
    """A row against the one that it changes in one thing, or the first: file, quality, time."""
    row = row_of(run, name)
    first = next(each for each in run["rows"] if each["group"] == row["group"])
    after = row.get("after")
    if after is None:
        speed = sentences.times_as_fast(row, first)
    else:
        first = row_of(run, after)
        speed = sentences.as_fast_in_words(row, "after_ratio", "after_low", "after_high")
    file = percent(row["file_bytes"] / first["file_bytes"] - 1)
    words = unbroken([f"{file} file", sentences.quality_of_file(row), f"{speed} as fast"])
    if after is None:
        return words
    # What this row changes, it changes in one runtime, and its reader knows in which.
    return f"{words} as {first['name'].partition(', ')[0]}"


# What a row says, by the number of the notebook; all others count bytes.
WORDS = {"02": row_in_ranks, "03": row_in_speed, "04": row_in_tokens, "06": row_in_file}


def unbroken(parts: list[str]) -> str:
    """In a narrow column a line ends between the parts, and not inside of them."""
    return ", ".join(part.replace(" ", NO_BREAK) for part in parts)


# --- runs of their own ----------------------------------------------------------------------------


def longer_positions(run: Run) -> str:
    """The loss on texts longer than those of the training, with and without YaRN."""
    plain = run["curves"]["none"][-1]
    yarn = run["curves"]["yarn"][-1]
    return f"loss at {run['tokens']:,} tokens {plain:.2f}, with YaRN {yarn:.2f}"


# By the name in a marker: the part that holds the run, and its words.
OWN_RUNS: dict[str, tuple[str, Callable[[Run], str]]] = {
    "rope": ("rope", longer_positions),
    "Muon": ("muon", render_muon.in_words),
    "grouped queries": ("architecture", render_architecture.grouped_queries),
    "RMSNorm": ("architecture", render_architecture.rms_norm),
    "SwiGLU": ("architecture", render_architecture.swiglu),
    "untied embeddings": ("architecture", render_architecture.untied),
    "depths": ("depths", render_depths.deepest),
    "distillation": ("distillation", render_distillation.distillation),
    "edge file": ("edge", render_edge.in_words),
    "quantization aware": ("quantization_aware", render_quantization_aware.won_back),
    "images in 8 bits": ("int8_images", render_int8_images.in_words),
    "a teacher of images": ("image_students", render_image_students.few_images),
    "servers": ("inference_peers", render_peers.servers),
}
