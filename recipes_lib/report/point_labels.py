"""Names beside the points of a chart, so that no name covers another name, a point or a line.

    name_points(axes, points, names, colors=colors)

There are some hundred places around a point. Each name takes the nearest one that covers nothing.
Then each looks again, now that all others have a place. A name that has to go further away gets a
thin line back to its point.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from recipes_lib.report.labels import POINTS, text_width

NAME_SIZE = 9.5
HEIGHT = 1.2  # of a name, in sizes of its font
# In points of print:
MARK = 4.5  # half the width of what is kept free around a point
NEAR = 4.0  # a name so near to another point could be taken for that point's
STEPS = (8, 14, 22, 32, 44, 58, 74)  # how far from the middle of its point a name may stand
LED = 10  # a name further away than this gets a line to its point
EDGE = 3.0  # what is kept free inside the axes

# Where a name stands, seen from its point: to the right first, because we read that way.
SIDES = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))
SIDES += ((1, 0.5), (1, -0.5), (-1, 0.5), (-1, -0.5), (0.5, 1), (0.5, -1), (-0.5, 1), (-0.5, -1))
PIECES = 80  # of a line that names keep away from
LED_PIECES = 24  # of a line from a name to its point
ROUNDS = 4  # how often each name looks for a place

# What a place costs, beside its distance:
OUTSIDE = 1000.0  # to leave the axes
COVERED = 100.0  # each name or point that is covered
ON_A_LINE = 2.0  # each piece of a line that is covered
CROSSED = 3.0  # each piece of the line to its own point that runs through something
TAKEN_FOR = 4.0  # to stand near another point

Point = tuple[float, float]
Boxes = np.ndarray  # [N, 4] or [4]: left, bottom, right, top, in dots of the canvas


class _Place(NamedTuple):
    """A place for a name: its box, how far it is from its point, and what it covers in any case."""

    box: Boxes
    step: float
    cost: float


def name_points(
    axes: Any,
    points: Sequence[Point],
    names: Sequence[str],
    *,
    colors: Sequence[Any],
    lines: Sequence[tuple[Point, Point]] = (),
) -> None:
    """Write each name beside its point.

    Set scales, limits and titles before: a name that found its place does not move with the axes.

    Args:
        points: in the units of the axes.
        colors: of each name.
        lines: straight lines on paper, by their ends, that no name should cover.
    """
    axes.figure.draw_without_rendering()  # only then are the axes where they will be
    dots = axes.figure.dpi / POINTS
    panel = np.array(axes.get_window_extent().padded(-EDGE * dots).extents)
    middles = np.array([axes.transData.transform(point) for point in points])  # [N, 2]
    pieces = _pieces_of(axes, lines, dots)
    possible = []
    for number, name in enumerate(names):
        size = (text_width(name, size=NAME_SIZE) * dots, HEIGHT * NAME_SIZE * dots)
        others = np.delete(middles, number, axis=0)
        places = _places(middles[number], size, dots)
        possible.append([_valued(box, step, others, pieces, panel, dots) for box, step in places])
    chosen = _chosen(possible, middles, pieces, dots=dots)
    for number, place in enumerate(chosen):
        _write(axes, points[number], names[number], place, color=colors[number])


def _pieces_of(axes: Any, lines: Sequence[tuple[Point, Point]], dots: float) -> Boxes:
    """Lines as many small boxes, which a name can be compared with."""
    pieces = [np.zeros((0, 4))]
    for ends in lines:
        begin, end = axes.transData.transform(ends)
        pieces.append(_around(_between(begin, end, PIECES), dots))
    return np.concatenate(pieces)


def _between(begin: np.ndarray, end: np.ndarray, count: int) -> np.ndarray:
    """Places on the way from one to the other, [count, 2]."""
    part = np.linspace(0, 1, count)[:, None]
    return begin + part * (end - begin)


def _around(middles: np.ndarray, reach: float) -> Boxes:
    """Squares around places [N, 2]."""
    return np.concatenate([middles - reach, middles + reach], axis=1)


def _places(
    middle: np.ndarray, size: tuple[float, float], dots: float
) -> Iterator[tuple[Boxes, float]]:
    """All boxes around a point with the steps to them, the nearest first."""
    half = np.array(size) / 2
    for step in STEPS:
        for side in SIDES:
            # The nearest edge of the name is `step` away from the point.
            centre = middle + np.array(side) * (step * dots + half)
            yield np.concatenate([centre - half, centre + half]), step


def _valued(
    box: Boxes, step: float, others: np.ndarray, pieces: Boxes, panel: Boxes, dots: float
) -> _Place:
    """A place with its cost against all that does not move: points, lines, the edge of the axes."""
    cost = COVERED * _overlaps(box, _around(others, MARK * dots))
    cost += ON_A_LINE * _overlaps(box, pieces)
    cost += TAKEN_FOR * _overlaps(box, _around(others, (MARK + NEAR) * dots))
    if (box[:2] < panel[:2]).any() or (box[2:] > panel[2:]).any():
        cost += OUTSIDE
    return _Place(box, step, cost + step / STEPS[0])


def _overlaps(box: Boxes, others: Boxes) -> int:
    """How many of the others this box covers in part."""
    beside = (others[:, 2] <= box[0]) | (others[:, 0] >= box[2])
    above = (others[:, 3] <= box[1]) | (others[:, 1] >= box[3])
    return int((~(beside | above)).sum())


def _chosen(
    possible: Sequence[Sequence[_Place]], middles: np.ndarray, pieces: Boxes, *, dots: float
) -> list[_Place]:
    """A place for each name, such that they cover little of each other.

    Who chooses first matters. So both orders are tried, and the one that covers less is taken.
    """
    marks = _around(middles, MARK * dots)
    best: dict[int, _Place] = {}
    least = np.inf
    for order in (range(len(possible)), range(len(possible))[::-1]):
        chosen: dict[int, _Place] = {}
        for _ in range(ROUNDS):
            total = 0.0
            for number in order:
                chosen.pop(number, None)  # it is not in its own way
                names = np.array([place.box for place in chosen.values()]).reshape(-1, 4)
                others = np.concatenate([names, np.delete(marks, number, axis=0), pieces])
                place, cost = _cheapest(possible[number], middles[number], names, others)
                chosen[number] = place
                total += cost
        if total < least:
            least = total
            best = chosen
    return [best[number] for number in range(len(possible))]


def _cheapest(
    places: Sequence[_Place], middle: np.ndarray, names: Boxes, in_the_way: Boxes
) -> tuple[_Place, float]:
    """The place that costs least beside the names that have theirs, and what it costs."""
    cheapest = places[0]
    least = np.inf
    for place in places:
        cost = place.cost + COVERED * _overlaps(place.box, names)
        if cost < least:
            cost += _cost_of_way(place, middle, in_the_way)
        if cost < least:
            least = cost
            cheapest = place
    return cheapest, least


def _cost_of_way(place: _Place, middle: np.ndarray, in_the_way: Boxes) -> float:
    """What the line from a name to its point runs through."""
    if place.step <= LED:  # there is none
        return 0.0
    begin = (place.box[:2] + place.box[2:]) / 2
    cost = 0.0
    for piece in _around(_between(begin, middle, LED_PIECES), 1.0):
        cost += CROSSED * _overlaps(piece, in_the_way)
    return cost


def _write(axes: Any, point: Point, name: str, place: _Place, *, color: Any) -> None:
    line = None
    if place.step > LED:
        line = {"arrowstyle": "-", "color": color, "linewidth": 0.7, "alpha": 0.7, "shrinkA": 0}
    # As parts of the axes: a place in dots would be another one in a file of another resolution.
    middle = axes.transAxes.inverted().transform((place.box[:2] + place.box[2:]) / 2)
    text = axes.annotate(
        name,
        point,
        middle,
        textcoords="axes fraction",
        ha="center",
        va="center",
        color=color,
        fontsize=NAME_SIZE,
        arrowprops=line,
        annotation_clip=False,
    )
    text.set_in_layout(False)  # it has found its place in the axes as they are
