"""What a ladder of speeds says: the lines that `climb` prints, and the cells of its table."""

from __future__ import annotations

from typing import Any

from recipes_lib.report.ladder_text import ratio_with_range

HEADER = ["step", "MB read", "prompt ms", "tokens/s", "× first", "GB/s", "of limit"]
HEADER += ["equal", "perplexity", "agreement"]


def what_is_allowed(weight_bytes: int, bandwidth: float) -> str:
    """The least time of a token: "a token reads 135 MB, so it takes 3.3 ms or more at 41 GB/s"."""
    least = milliseconds(weight_bytes / bandwidth)
    # Decimal, as bandwidths are given: then 135 MB at 41 GB/s can be divided in the head.
    reads = f"a token reads {megabytes(weight_bytes)} MB"
    return f"{reads}, so it takes {least} or more at {bandwidth / 1e9:,.0f} GB/s"


def what_came(row: Any, *, first: Any) -> str:
    """The measured speed, and whether the text is that of the first row of the group."""
    sentence = (
        f"the prompt took {1000 * row.prompt_seconds:,.0f} ms, each token after the first "
        f"{milliseconds(row.seconds_per_token)} "
        f"({row.tokens_per_second:,.0f} tokens/s), {row.share_of_limit:.0%} of the limit"
    )
    if first is None:
        return sentence
    sentence += f", {_ratio(row, first):.2f}× as fast as {first.name}"
    return f"{sentence}; tokens {row.equal_tokens}/{row.tokens} equal"


def cells(row: Any, *, first: Any) -> list[str]:
    """The cells of a row, below HEADER.

    Args:
        first: what the row is compared with; None for the first row of a group.
    """
    equal = ""
    if row.equal_tokens is not None:
        equal = f"{row.equal_tokens}/{row.tokens}"
    perplexity = ""
    if row.perplexity is not None:
        perplexity = f"{row.perplexity:,.2f}"
    agreement = ""
    if row.agreement is not None:
        agreement = f"{row.agreement:.1%}"
    return [
        row.name,
        megabytes(row.weight_bytes),
        f"{1000 * row.prompt_seconds:,.0f}",
        f"{row.tokens_per_second:,.0f}",
        _ratio_in_words(row, first),
        f"{row.gigabytes_per_second:.1f}",
        f"{row.share_of_limit:.0%}",
        equal,
        perplexity,
        agreement,
    ]


def _ratio_in_words(row: Any, first: Any) -> str:
    """How many times as fast, with its range if runs took turns."""
    if row.ratio is not None:
        return ratio_with_range(row)
    if first is None:
        return "1.00×"
    return f"{_ratio(row, first):.2f}×"


def _ratio(row: Any, first: Any) -> float:
    if row.ratio is not None:
        return row.ratio
    return first.seconds_per_token / row.seconds_per_token


def megabytes(size: float) -> str:
    """Bytes as whole megabytes, 10^6 each."""
    return f"{size / 1e6:,.0f}"


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds with one digit: "3.3 ms"."""
    return f"{1000 * seconds:.1f} ms"
