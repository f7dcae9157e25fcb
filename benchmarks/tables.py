"""Recorded runs as markdown tables, each with a note that says where it was measured."""

from __future__ import annotations

from typing import Any

from benchmarks.record import machine_line
from benchmarks.sentences import time_ratio
from recipes_lib.report.style import mib, percent

NONE_YET = (
    "*No such run is recorded yet: `make gpu` makes one, "
    "`python -m benchmarks.render` writes it here.*"
)
UNSURE = (
    "Times are of a few steps each: on a shared CPU they change from run to run, and bytes do not."
)
# What the columns of a ladder mean, by the number of the notebook.
NOTES = {
    "01": (
        "Time is relative to the baseline's step; rows with + keep checkpointing on. "
        "Mixed precision has a row where 16-bit products are not emulated."
    ),
    "04": (
        "Found to within 1 %; the prediction against where the bytes reach the limit. "
        "Time: forward and backward at {timed_at:,} tokens, in turns, relative to the baseline's."
    ),
    "05": "Time is per token, relative to full fine-tuning; the last row packs.",
}

# --- ladders ------------------------------------------------------------------------------------


def ladder(run: dict[str, Any] | None, other: dict[str, Any] | None = None, *, number: str) -> str:
    """The ladder of bytes of a notebook, with a column for the time on `other`, if that differs.

    Args:
        other: a run on the other kind of CPU, with or without native bf16.
        number: of the notebook.
    """
    if run is None:
        return NONE_YET
    notes = [f"{machine_line(run)}. {NOTES[number]}"]
    notes += _how_sure(run)
    columns = ["step", "predicted", "measured", "to the baseline", "time"]
    other_times: dict[str, str] = {}
    if other is not None and other["native_bf16"] != run["native_bf16"]:
        columns.append(_other_column(other))
        notes.append(f"Last column: the time on {machine_line(other)}.")
        other_times = _times(other)

    times = _times(run)
    first = run["rows"][0]
    lines = []
    for row in run["rows"]:
        name = row["name"]
        change = percent(row["peak_bytes"] / first["peak_bytes"] - 1)
        cells = [name, mib(row["predicted_bytes"]), mib(row["peak_bytes"]), change, times[name]]
        if name in other_times:  # else the row ends one cell earlier, which markdown allows
            cells.append(other_times[name])
        lines.append(_line(cells))
    # Rows that only the other machine has, for instance of mixed precision.
    for name, time in other_times.items():
        if name not in times:
            lines.append(f"| {name} | | | | | {time} |")
    return _table(columns, lines, notes)


def _other_column(other: dict[str, Any]) -> str:
    if other["native_bf16"]:
        return "time, native bf16"
    return "time, no native bf16"


def _times(run: dict[str, Any]) -> dict[str, str]:
    """The time of each row per token, relative to the first row of its run."""
    first = run["rows"][0]
    return {row["name"]: f"{time_ratio(row, first):.2f}×" for row in run["rows"]}


def lengths(run: dict[str, Any] | None) -> str:
    """A ladder of lengths."""
    if run is None:
        return NONE_YET
    first = run["rows"][0]
    lines = []
    for row in run["rows"]:
        cells = [
            row["name"],
            f"{row['predicted_tokens']:,}",
            f"{row['predicted_tokens'] / row['crossing'] - 1:+.1%}",
            f"{row['tokens']:,}",
            f"{row['tokens'] / first['tokens']:.1f}×",
            f"{row['seconds'] / first['seconds']:.2f}×",
        ]
        lines.append(_line(cells))
    facts = run["facts"]
    what = f"{facts['model']} in {facts['limit_bytes'] / 2**30:.0f} GiB of tensors."
    notes = [f"{machine_line(run)}. {what} {NOTES['04'].format(**facts)}"]
    notes += _how_sure(run)
    columns = ["step", "predicted tokens", "off by", "longest found", "to the baseline", "time"]
    return _table(columns, lines, notes)


def _how_sure(run: dict[str, Any]) -> list[str]:
    if run["device"] == "cpu":
        return [UNSURE]
    return []


# --- beside libraries ---------------------------------------------------------------------------


def versus(run: dict[str, Any] | None) -> str:
    """Our recipes beside the libraries that do the same."""
    if run is None:
        return NONE_YET
    lines = []
    for technique, pair in run["pairs"].items():
        cells = [technique.replace("_", " "), pair["library"]]
        for ratio in ("time_ratio", "peak_ratio"):
            if ratio in pair:
                cells.append(f"{pair[ratio]:.2f}×")
            else:  # a pair that failed has a reason in place of numbers
                cells.append("failed")
        lines.append(_line(cells))
    note = "The recipe's over the library's: below 1 the recipe wins."
    columns = ["recipe", "library", "time", "peak"]
    return _table(columns, lines, [f"{machine_line(run)}. {note} {limits(run)}"], names=2)


def limits(run: dict[str, Any]) -> str:
    """What the machine can do at best, beside which a ratio is read."""
    if "limits" not in run["parts"]:
        return ""
    most = run["parts"]["limits"]
    return (
        f"This machine: {most['bf16_tflops']:,.1f} TFLOP/s in bf16, "
        f"{most['copy_gb_per_s']:,.0f} GB/s in copies."
    )


def finetune(run: dict[str, Any] | None) -> str:
    """QLoRA by our loop beside the Trainer."""
    if run is None:  # no default part, because it takes minutes: say how to ask for it
        return NONE_YET.replace("make gpu", 'make gpu ARGS="--parts finetune"')
    base = run["ways"]["Trainer"].get("tokens_per_second")  # a Trainer that failed has none
    lines = [_way(name, row, base) for name, row in run["ways"].items()]
    notes = [_settings(run)]
    if any("flex" in name for name in run["ways"]):
        notes.append("With flex attention it is one row as long as those.")
    updates = _updates(run)
    if updates:
        notes.append(f"AdamW's update of {run['parameters']:,} parameters: {'; '.join(updates)}.")
    columns = ["way", "useful tokens/s", "to the Trainer", "peak GiB"]
    return _table(columns, lines, notes)


def _way(name: str, row: dict[str, Any], base: float | None) -> str:
    if "failed" in row:
        why = "failed"
        if row["failed"].startswith("ImportError"):
            why = "not installed"
        return f"| {name} | {why} | | |"
    ratio = ""
    if base:
        ratio = f"{row['tokens_per_second'] / base:.2f}×"
    speed = f"{row['tokens_per_second']:,.0f}"
    return _line([name, speed, ratio, f"{row['peak_bytes'] / 2**30:.2f}"])


def _settings(run: dict[str, Any]) -> str:
    checkpointing = "off"
    if run["gradient_checkpointing"]:
        checkpointing = "on"
    return (
        f"{machine_line(run)}. {run['shape']}, {run['layers'] or 'all'} layers, "
        f"gradient checkpointing {checkpointing}. A padded step has {run['documents']} pairs of at "
        f"most {run['max_tokens']} tokens ({run['useful_share']['padded']:.0%} is text); packed, a "
        f"step has {run['packs']} rows of {run['max_tokens']} tokens."
    )


def _updates(run: dict[str, Any]) -> list[str]:
    """What AdamW's update costs with each kind of states, where it was measured."""
    found = []
    for kind, row in run.get("updates", {}).items():
        if "failed" not in row:
            milliseconds = row["seconds"] * 1000
            states = row["bytes_per_parameter"]
            found.append(f"{kind} {milliseconds:,.1f} ms and {states:.1f} bytes per parameter")
    return found


# --- markdown -----------------------------------------------------------------------------------


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _table(columns: list[str], lines: list[str], notes: list[str], *, names: int = 1) -> str:
    """A table with `notes` below it; the first `names` columns hold text, all others numbers."""
    numbers = len(columns) - names
    rule = "|" + "---|" * names + "--:|" * numbers
    return "\n".join([_line(columns), rule, *lines, "", f"*{' '.join(notes)}*"])
