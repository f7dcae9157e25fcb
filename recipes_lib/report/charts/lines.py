"""Lines: one per run or variant, named at its end.

lines({"a cache": [(1, 3.0), (256, 3.2)], "none": …}, title=…, xlabel="position", ylabel="ms")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recipes_lib.report.charts.figure import WIDTH, Chart, name_at_right, new_figure, set_up
from recipes_lib.report.style import DASHES, LINES

Curves = Mapping[str, Sequence[tuple[float, float]]]  # (x, y) from left to right, by name


def lines(
    curves: Curves,
    *,
    title: str,
    source: str | None = None,
    dots: bool = True,
    width: float = WIDTH,
    **settings: Any,
) -> Chart:
    """Draw one line per curve; the first is what the others are compared with.

    Args:
        title: the message.
        source: where the numbers are from; by default this machine and today.
        dots: mark each point, too.
        width: inches; NARROW for phones.
        settings: of `Axes.set`: xlabel, ylabel, xscale, ylim and so on.
    """
    figure, axes = new_figure(title, source=source, width=width)
    draw_lines(axes, curves, dots=dots, **settings)
    return figure


def draw_lines(axes: Any, curves: Curves, *, dots: bool = False, **settings: Any) -> None:
    """Lines in axes that are there already. What is drawn later does not move their limits."""
    marker = "o" if dots else None
    names_at_ends = []
    for number, (name, curve) in enumerate(curves.items()):
        color = LINES[number % len(LINES)]
        xs = [x for x, _ in curve]
        ys = [y for _, y in curve]
        # Dashes of its own as well: colours alone are not for everyone.
        dashes = DASHES[number % len(DASHES)]
        look = {"color": color, "linestyle": dashes, "linewidth": 1.8}
        axes.plot(xs, ys, marker=marker, markersize=4, **look)
        names_at_ends.append((name, curve[-1], color))
    set_up(axes, **settings)
    name_at_right(axes, names_at_ends)
