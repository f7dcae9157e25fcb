"""What a ladder of bytes says: the lines that `climb` prints, and the cells of its table."""

from __future__ import annotations

import textwrap
from typing import Any

from recipes_lib.core.predict.budget import Budget, in_words
from recipes_lib.report.style import mib, percent

WIDTH = 88  # of a line, as in the code cells of a notebook
SMALL = 0.01  # of the peak: a term that changes by less is not worth a word
SAME_LOSS = 1e-3  # in nats per token: losses that differ by more are not called the same

HEADER = ["step", "predicted", "measured", "change", "time", "s/step", "of limit", "loss"]


def wrapped(text: str) -> str:
    """Indented lines that are not too long."""
    return textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="  ")


# --- the budget's difference ----------------------------------------------------------------------

ALWAYS = ("weights", "states")

# The terms of a budget that a moment consists of, beside those.
ALIVE = {
    "backward begins": ("carried", "activations", "loss", "block_gradients"),
    "backward enters the first block": (
        "gradients",
        "last_gradients",
        "one_block",
        "block_gradients",
    ),
    "a block is computed": ("gradients", "activations", "one_block", "block_gradients"),
    "the last gradient arrives": ("gradients", "embedding_gradient"),
}


def what_changes(old: Budget, new: Budget) -> str:
    """Which terms of the budget a recipe changes, and where the moment of the peak goes.

    "activations 820 → 103 MiB, carried 0 → 513 MiB; the peak moves to: the last gradient arrives"
    """
    changes = []
    before = old.terms()
    # Terms that are alive at neither peak would only lengthen the sentence.
    alive = {*ALWAYS, *ALIVE[old.peak_moment()], *ALIVE[new.peak_moment()]}
    for term, size in new.terms().items():
        if term in alive and abs(size - before[term]) > SMALL * old.peak:
            was = mib(before[term]).removesuffix(" MiB")
            changes.append(f"{in_words(term)} {was} → {mib(size)}")
    if not changes:
        changes = [f"no term changes by more than {SMALL:.0%} of the peak"]
    moment = new.peak_moment()
    moves = "stays at" if moment == old.peak_moment() else "moves to"
    return f"{', '.join(changes)}; the peak {moves}: {moment}"


# --- what was measured ----------------------------------------------------------------------------


def what_came(row: Any, *, baseline: Any, reference: Any) -> str:
    """The measured peak, and whether the loss is that of the reference."""
    sentence = f"measured {mib(row.peak_bytes)}"
    if row is not baseline:
        change = percent(row.peak_bytes / baseline.peak_bytes - 1)
        sentence += f" ({change} against the baseline)"
    if row.loss is None:
        return sentence
    sentence += f", loss {row.loss:.4f}"
    if reference is not None and reference.loss is not None:
        sentence += f", {compared(row.loss, reference)}"
    return sentence


def compared(loss: float, reference: Any) -> str:
    """Whether a loss is that of the reference: "the baseline's to 1e-07"."""
    difference = loss - reference.loss
    whose = f"the {reference.name}'s"
    if reference.name != "baseline":
        whose = f"that of {reference.name}"
    if difference == 0:
        return f"{whose} to the last bit"
    if abs(difference) <= SAME_LOSS:
        return f"{whose} to {abs(difference):.0e}"
    return f"{difference:+.4f} against {whose}"


# --- the table ------------------------------------------------------------------------------------


def cells(row: Any, baseline: Any) -> list[str]:
    """The cells of a row, below HEADER."""
    change = ""
    if row is not baseline:
        change = percent(row.peak_bytes / baseline.peak_bytes - 1)
    share = ""
    if row.share_of_limit is not None:
        share = f"{row.share_of_limit:.0%}"
    loss = ""
    if row.loss is not None:
        loss = f"{row.loss:.4f}"
    return [
        row.name,
        mib(row.predicted_bytes),
        mib(row.peak_bytes),
        change,
        _time(row, baseline),
        f"{row.seconds:.2f}",
        share,
        loss,
    ]


def _time(row: Any, baseline: Any) -> str:
    """The time over the baseline's, with its range if steps took turns."""
    if row.ratio is not None:
        return ratio_with_range(row)
    return f"{row.seconds / baseline.seconds:.2f}×"


def ratio_with_range(row: Any) -> str:
    """How a row compares with the first one, round by round: "1.02× (0.97–1.08)"."""
    return f"{row.ratio:.2f}× ({row.ratio_low:.2f}–{row.ratio_high:.2f})"
