"""Text that fits: its width, lines of it, places that keep apart, ink to read on a colour."""

from __future__ import annotations

from typing import Any

from matplotlib.colors import to_rgb
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from recipes_lib.report.style import LIGHT

POINTS = 72  # per inch


def text_width(text: str, *, size: float, bold: bool = False) -> float:
    """How wide a text is, in points."""
    if not text.strip():
        return 0.0  # blanks have no outline
    # The outlines of the letters have a width before there is a figure that could draw them.
    font = FontProperties(weight="bold" if bold else "normal")
    return TextPath((0, 0), text, size=size, prop=font).get_extents().width


def wrap(text: str, room: float, *, size: float, bold: bool = False) -> list[str]:
    """The text in lines of at most `room` points, broken between words."""
    lines: list[str] = []
    for word in text.split():
        longer = word
        if lines:
            longer = f"{lines[-1]} {word}"
        if lines and text_width(longer, size=size, bold=bold) <= room:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def keep_apart(places: list[float], gap: float) -> list[float]:
    """Move places as little as possible, so that neighbours are at least `gap` apart.

    Labels at the ends of lines need it: lines may end at one height, words cannot.
    """
    order = sorted(range(len(places)), key=places.__getitem__)
    # Every label takes off one gap for each label before it. Two that were just far enough apart
    # are now at the same place, and two that were too near are in the wrong order.
    without_gaps = [places[index] - number * gap for number, index in enumerate(order)]
    moved = [0.0] * len(places)
    for number, (index, place) in enumerate(zip(order, _in_order(without_gaps), strict=True)):
        moved[index] = place + number * gap
    return moved


def _in_order(values: list[float]) -> list[float]:
    """The nearest values of which none is below the one before (isotonic regression).

    Values in the wrong order form a group, and each takes the group's mean. That may be below
    the mean of the group before; then both become one.
    """
    groups: list[list[float]] = []
    for value in values:
        groups.append([value])
        while len(groups) > 1 and _mean(groups[-2]) > _mean(groups[-1]):
            last = groups.pop()
            groups[-1] += last
    return [_mean(group) for group in groups for _ in group]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def readable_on(color: Any) -> str:
    """Black or white, whichever is easier to read on this colour."""
    # The eye sees green as brighter than red, and red as brighter than blue (ITU-R BT.601).
    red, green, blue = to_rgb(color)
    # The limit keeps white on the loss's green (0.51), and black on the activations' orange (0.63).
    brightness = 0.299 * red + 0.587 * green + 0.114 * blue
    return LIGHT["ink"] if brightness > 0.55 else "#ffffff"
