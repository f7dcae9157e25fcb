"""What all charts have in common: colours with one meaning each, numbers in words, sources.

A figure has no ground of its own: it stands on whatever page shows it, a white or a dark one. So
every colour is between the two, far enough from both. A colour means the same in every chart, and
no chart needs it alone: a bar, a line or a layer also carries its name or its number.
"""

from __future__ import annotations

import datetime
import re

from recipes_lib.core.measure.machine import GIB, machine

MIB = 2**20
MILLISECONDS = 1000.0  # of a second
MEGABYTE = 10**6  # as files are given on devices and in stores

# --- the palette ----------------------------------------------------------------------------------

INK = "#797979"  # text, axes and rules: as far from white as from #111
MARK = "#1f2328"  # predictions and ranges, drawn with a white edge: they lie on bars of all colours

REFERENCE = "#8b95a1"  # what others are compared with: the baseline, a limit, the line of no change
RECIPE = "#3b82c4"  # what a recipe was measured to take
TIME = "#6c8fb0"  # seconds, beside the bytes that are the subject
LOST = "#d1494b"  # what to look at: what is missing, or outside

# The terms of a budget, in the order in which they are stacked.
TERMS = {
    "weights": "#6b7485",
    "states": "#9457c4",
    "gradients": "#d1494b",
    "activations": "#dd8e0f",
    "loss": "#2f9e82",
}

# A timeline has the same kinds, but cannot tell the bytes of the loss: most of them are among the
# others, which have its colour.
KIND_COLORS = {kind: TERMS[kind] for kind in ("weights", "states", "gradients", "activations")}
KIND_COLORS["other"] = TERMS["loss"]

# What a rank does at a time.
WORK = {
    "forward": TERMS["loss"],
    "backward": TERMS["activations"],
    "step": TERMS["states"],
    "send": TERMS["gradients"],
}

# Lines of runs that are compared: the first is what the others are compared with.
LINES = (REFERENCE, "#3b82c4", "#c96a2a", "#14aa55", "#9457c4", "#c060ad")
DASHES = ("-", "--", "-.", (0, (1, 1.2)), (0, (5, 1, 1, 1, 1, 1)))

# --- numbers --------------------------------------------------------------------------------------

SHARE = "{:.0%}".format
WHOLE = "{:,.0f}".format
FACTOR = "{:.2f}".format


def percent(change: float) -> str:
    """A change as a signed whole number of per cent."""
    # `+ 0.0` turns the -0.0 that rounding may leave into 0.0: "-0%" would read like a loss.
    return f"{round(change, 2) + 0.0:+.0%}"


def mib(size: float) -> str:
    """Bytes as MiB, with one digit where there are few."""
    if size < 10 * MIB:
        return f"{size / MIB:.1f} MiB"
    return f"{size / MIB:,.0f} MiB"


def megabytes(size: float) -> str:
    """Bytes in millions, with three digits at most."""
    return f"{three_digits(size / MEGABYTE)} MB"


def milliseconds(seconds: float) -> str:
    """Seconds in thousandths, with three digits at most."""
    return f"{three_digits(seconds * MILLISECONDS)} ms"


def three_digits(value: float) -> str:
    """A number with three digits at most: 0.042, 3.10, 12.4, 125."""
    if value < 0.1:
        return f"{value:#.2g}"
    if value < 10:
        return f"{value:.2f}"
    if value < 100:
        return f"{value:.1f}"
    return f"{value:,.0f}"


class Unit:
    """MiB or GiB, by the largest size of a chart: one unit per chart."""

    def __init__(self, largest: float) -> None:
        self.name = "MiB"
        self.bytes = MIB
        if largest >= 10 * GIB:
            self.name = "GiB"
            self.bytes = GIB

    def of(self, size: float) -> float:
        """Bytes in this unit."""
        return size / self.bytes

    def number(self, size: float) -> str:
        """Bytes in this unit as text, without its name."""
        value = self.of(size)
        if value < 10 or (value < 100 and self.name == "GiB"):
            return f"{value:.1f}"
        return f"{value:,.0f}"

    def text(self, size: float) -> str:
        """Bytes in this unit as text."""
        return f"{self.number(size)} {self.name}"


# --- sources --------------------------------------------------------------------------------------

BY_ARITHMETIC = "computed from the model's shape before anything ran"


def measured_here() -> str:
    """The source line of a chart that this process has measured."""
    here = machine()
    # "Intel(R) Xeon(R) Processor @ 2.70GHz" becomes "Intel Xeon".
    name = re.sub(r"\((R|TM)\)|@.*|\b(Processor|CPU)\b", " ", here.name)
    parts = [" ".join(name.split())]
    if here.device == "cpu":
        parts.append(f"{here.cores} CPU cores")
    parts.append(datetime.date.today().isoformat())
    return "measured on " + ", ".join(parts)
