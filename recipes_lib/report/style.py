"""What all charts have in common: colours with one meaning each, numbers in words, sources.

    axes.barh(names, sizes, color=RECIPE)
    axes.set_title(Unit(max(sizes)).text(sizes[0]))

A colour means the same in every chart: whoever has read one can read the next. The colours of terms
stay apart for colour-blind readers, and no chart needs them alone: a segment, a line or a layer
also carries its name or its number.
"""

from __future__ import annotations

import datetime
import re
from typing import Any

from recipes_lib.core.measure.machine import GIB, machine

MIB = 2**20
MILLISECONDS = 1000.0  # of a second

# --- the palette ----------------------------------------------------------------------------------

REFERENCE = "#9aa5b1"  # what others are compared with: the baseline, a limit, the line of no change
RECIPE = "#3b82c4"  # what a recipe was measured to take
TIME = "#8fb3cf"  # seconds, beside the bytes that are the subject
SHARE = "#b9cbd9"  # how much of what the machine can do was used

# The terms of a budget, in the order in which they are stacked. The copies of an embedding are
# a darker red than the gradients they become, gradients inside a block a paler yellow than the
# activations they belong to.
TERMS = {
    "weights": "#535b6b",
    "states": "#773ca4",
    "gradients": "#c34243",
    "embedding copies": "#691924",
    "activations": "#e89a10",
    "block gradients": "#f4da7d",
    "loss": "#38a58b",
}

# The kinds of a timeline have the colours of a budget's terms. It cannot tell which bytes
# are the loss's: they are among the others.
KIND_COLORS = {
    "weights": TERMS["weights"],
    "states": TERMS["states"],
    "gradients": TERMS["gradients"],
    "activations": TERMS["activations"],
    "other": "#b9c2cc",
}

# Lines of runs that are compared: the first is what the others are compared with.
LINES = ("#6e7781", "#3b82c4", "#aa4e19", "#14aa55", "#0f214b", "#c060ad")
DASHES = ("-", "--", "-.", (0, (1, 1.2)), (0, (5, 1, 1, 1, 1, 1)))

# Kinds of operators, in the order of their time.
OPERATORS = ("#3b82c4", "#9fd0c0", "#16425b", "#8fc1e3", "#2f7d6b", "#b9b98a", "#66763a", "#d6dfe6")

# --- the page -------------------------------------------------------------------------------------

# A figure is a card: its own paper and ink keep it legible on a dark page as well.
LIGHT = {"paper": "#ffffff", "ink": "#1f2328", "muted": "#59636e", "faint": "#d1d9e0"}
DARK = {"paper": "#0d1117", "ink": "#f0f6fc", "muted": "#9198a1", "faint": "#3d444d"}

DPI = 200  # two dots per point of a screen: sharp on every display

# --- numbers --------------------------------------------------------------------------------------


def percent(change: float) -> str:
    """A change as a signed whole number of per cent."""
    # `+ 0.0` turns the -0.0 that rounding may leave into 0.0: "-0%" would read like a loss.
    return f"{round(change, 2) + 0.0:+.0%}"


def mib(size: float) -> str:
    """Bytes as whole MiB."""
    return f"{size / MIB:,.0f} MiB"


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
        return self.words(self.of(size))

    def words(self, value: float) -> str:
        """A number of this unit as text."""
        if self.bytes == GIB and value < 100:
            return f"{value:.1f}"
        return f"{value:,.0f}"

    def text(self, size: float) -> str:
        """Bytes in this unit as text."""
        return f"{self.number(size)} {self.name}"


def three_digits(seconds: float) -> str:
    """Seconds as text, with three digits at most: 0.042, 3.10, 12.4, 125."""
    if seconds < 0.1:
        return f"{seconds:#.2g}"
    if seconds < 10:
        return f"{seconds:.2f}"
    if seconds < 100:
        return f"{seconds:.1f}"
    return f"{seconds:,.0f}"


# --- sources --------------------------------------------------------------------------------------

BY_ARITHMETIC = "computed from the model's shape before anything ran"


def measured_here() -> str:
    """The source line of what this process has measured."""
    here = machine()
    today = datetime.date.today().isoformat()
    return measured_on({"name": here.name, "device": here.device, "cores": here.cores}, today)


def measured_on(run: dict[str, Any], date: str | None = None) -> str:
    """The source line of a recorded run, from the facts that are stored with it."""
    # "Intel(R) Xeon(R) Processor @ 2.70GHz" becomes "Intel Xeon".
    name = re.sub(r"\((R|TM)\)|@.*|\b(Processor|CPU)\b", " ", run["name"])
    parts = [" ".join(name.split())]
    if run["device"] == "cpu":
        parts.append(f"{run['cores']} CPU cores")
    parts.append(date or run["date"])
    return "measured on " + ", ".join(parts)
