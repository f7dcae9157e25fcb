"""What a ladder of devices says: the lines that `climb` prints, and the cells of its table."""

from __future__ import annotations

from typing import Any

from recipes_lib.report.style import MILLISECONDS, three_digits

MEGABYTE = 10**6  # as files are given on devices and in stores

HEADER = ["model", "quality", "predicted", "file", "of first file"]
HEADER += ["time to load", "added memory", "time for one", "times as fast"]


def what_is_expected(size: int) -> str:
    """How large the file will be by arithmetic."""
    return f"predicted file {megabytes(size)}"


def what_came(row: Any, *, first: Any) -> str:
    """How large the file is, how good the model in it, and how fast."""
    sentence = f"file {megabytes(row.file_bytes)}"
    if row is not first:
        sentence += f" ({row.file_bytes / first.file_bytes:.0%} of {first.name})"
    sentence += f"; {quality(row)}; {milliseconds(row.seconds)} each"
    if row is not first:
        sentence += f" ({as_fast(row, first)} as fast)"
    if row.peak_bytes is not None:
        sentence += f"; adds {megabytes(row.peak_bytes)} to the process"
    return sentence


def cells(row: Any, *, first: Any) -> list[str]:
    """The cells of a row, below HEADER."""
    return [
        row.name,
        quality(row),
        _or_empty(row.predicted_bytes, megabytes),
        megabytes(row.file_bytes),
        f"{row.file_bytes / first.file_bytes:.0%}",
        _or_empty(row.load_seconds, milliseconds),
        _or_empty(row.peak_bytes, megabytes),
        milliseconds(row.seconds),
        as_fast(row, first),
    ]


def quality(row: Any) -> str:
    """ "98.2 % right", or "perplexity 13.7", or "91 % the same"."""
    if row.accuracy is not None:
        return f"{100 * row.accuracy:.1f} % right"
    if row.agreement is not None:
        return f"{100 * row.agreement:.0f} % the same"
    return f"perplexity {row.perplexity:.2f}"


def megabytes(size: float) -> str:
    """Bytes in millions, with three digits at most."""
    return f"{three_digits(size / MEGABYTE)} MB"


def milliseconds(seconds: float) -> str:
    """Seconds in thousandths, with three digits at most."""
    return f"{three_digits(seconds * MILLISECONDS)} ms"


def as_fast(row: Any, first: Any) -> str:
    """How many times as fast as the first row, with its range after turns: "38.2× (35.0–41.1)"."""
    if row.ratio is None:
        return f"{three_digits(first.seconds / row.seconds)}×"
    low = three_digits(1 / row.ratio_high)
    high = three_digits(1 / row.ratio_low)
    return f"{three_digits(1 / row.ratio)}× ({low}–{high})"


def _or_empty(value: float | None, words: Any) -> str:
    if value is None:
        return ""
    return words(value)
