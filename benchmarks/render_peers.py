"""The run of `benchmarks.inference_peers` in the texts: a table, a block of a notebook, and a cell.

A peer is another program that runs the same model. Its ratio is its time over that of our row with
as many bits, in the same round: below 1 the other program is faster.
"""

from __future__ import annotations

from typing import Any

from benchmarks.record import machine_line
from benchmarks.table_text import line, table

Run = dict[str, Any]
Row = dict[str, Any]

MISSING = "missing"
MUCH = 0.8  # of our time: below that a note says where ours goes

# --- tables -------------------------------------------------------------------------------------


def peers(run: Run | None) -> str:
    """Milliseconds of each program and format. Nothing where no run is recorded."""
    if run is None:
        return ""
    lines = [line(_cells(row, run["new_tokens"])) for row in run["rows"]]
    notes = [
        f"{machine_line(run)}. {_threads(run)}; {_programs(run)}.",
        f"One text: {run['new_tokens']} tokens after {run['decode_after_tokens']}, and a prompt of "
        f"{run['prefill_tokens']:,} tokens. Medians of {run['rounds']} rounds in turns; in "
        f"brackets are the lowest and the highest.",
        "To ours: the time over that of our row with as many bits and weights of that kind, in the "
        "same round. Below 1 the other program is faster. The verdict is on a token, and stands "
        "only if no round disagrees.",
        "Equal tokens: up to the first that differs from those of `generate` in fp32.",
        *_shares_of_time(run),
        *_why_missing(run),
    ]
    columns = ["program", "bits", "ms per token", "to ours", "verdict", "prompt, ms", "to ours"]
    return table([*columns, "equal tokens"], lines, notes)


def _cells(row: Row, new_tokens: int) -> list[str]:
    """The numbers of a row, or one word where the program could not run."""
    if row["reason"] is not None:
        return [row["name"], f"{row['bits']}", MISSING, "", "", "", "", ""]
    says = ""
    if row["ratio"] is not None:
        says = verdict(row["ratio"])
    return [
        row["name"],
        f"{row['bits']}",
        _milliseconds(row["decode_ms"], 1),
        _ratio(row["ratio"]),
        says,
        _milliseconds(row["prefill_ms"], 0),
        _ratio(row["prefill_ratio"]),
        f"{row['equal_tokens']}/{new_tokens}",
    ]


# --- a notebook ---------------------------------------------------------------------------------


def block(run: Run | None) -> str:
    """The same table, below the sentences of the fastest program of each number of bits."""
    if run is None:
        return ""
    return f"{in_words(run)}\n\n{peers(run)}"


def in_words(run: Run) -> str:
    """For each number of bits the fastest other program beside ours."""
    says = {
        "faster": "so it is faster",
        "slower": "so it is slower",
        "undecided": "and the rounds do not agree which is faster",
    }
    sentences = []
    for bits, row in fastest(run).items():
        sentences.append(
            f"With {bits} bits, {row['name']} needs {_ratio(row['ratio'])} the time of "
            f"{row['beside']} for a token, {says[verdict(row['ratio'])]}."
        )
    return " ".join(sentences)


# --- cells --------------------------------------------------------------------------------------


def servers(run: Run) -> str:
    """The fastest program without PyTorch for each number of bits; nothing if none ran."""
    others = [row for row in run["rows"] if "transformers" not in row["program"]]
    found = fastest(run | {"rows": others})
    if not found:
        return ""
    words = [f"{row['name']} {_ratio(row['ratio'])}" for row in found.values()]
    return f"time of a token to ours with as many bits: {'; '.join(words)}"


# --- what they share ------------------------------------------------------------------------------


def verdict(ratio: dict[str, float]) -> str:
    """What the lowest and the highest ratio of all rounds allow to say of the other program."""
    if ratio["high"] < 1:
        return "faster"
    if ratio["low"] > 1:
        return "slower"
    return "undecided"


def fastest(run: Run) -> dict[int, Row]:
    """For each number of bits the other program with the lowest ratio, most bits first."""
    found: dict[int, Row] = {}
    for row in run["rows"]:
        if row["reason"] is not None or row["ratio"] is None:
            continue
        best = found.get(row["bits"])
        if best is None or row["ratio"]["median"] < best["ratio"]["median"]:
            found[row["bits"]] = row
    return dict(sorted(found.items(), reverse=True))


def _ratio(ratio: dict[str, Any] | None) -> str:
    """The median and the range; nothing for a row of ours, which is compared with no other."""
    if ratio is None:
        return ""
    return f"{ratio['median']:.2f}× ({ratio['low']:.2f}–{ratio['high']:.2f})"


def _milliseconds(time: dict[str, Any], digits: int) -> str:
    low = f"{time['low']:,.{digits}f}"
    high = f"{time['high']:,.{digits}f}"
    return f"{time['median']:,.{digits}f} ({low}–{high})"


def _threads(run: Run) -> str:
    if run["threads"] == 1:
        return "One thread"
    return f"{run['threads']} threads"


def _programs(run: Run) -> str:
    """The versions of all programs that ran."""
    versions = {row["program"]: row["version"] for row in run["rows"] if row["reason"] is None}
    return "; ".join(_named(program, version) for program, version in versions.items())


def _named(program: str, version: str | None) -> str:
    if version is None:
        return program
    return f"{program} ({version})"


def _shares_of_time(run: Run) -> list[str]:
    """Where our rows spend a token to which another program needs less than four fifths."""
    beaten = {row["beside"] for row in fastest(run).values() if row["ratio"]["median"] < MUCH}
    parts = []
    for row in run["rows"]:
        if row["name"] in beaten and "products_ms" in row:
            parts.append(
                f"{row['name']} {row['products_ms']:.1f} ms in products and "
                f"{row['rest_ms']:.1f} ms in the rest"
            )
    if not parts:
        return []
    return [f"A token takes {'; '.join(parts)}."]


def _why_missing(run: Run) -> list[str]:
    """The reason of each program that could not run."""
    reasons = []
    for row in run["rows"]:
        if row["reason"] is not None:
            reasons.append(f"{row['name']} is missing: {row['reason'].rstrip('.')}.")
    return reasons
