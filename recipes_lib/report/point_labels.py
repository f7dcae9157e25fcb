"""Names beside the points of a chart, so that no name covers another name, a point or a line.

    name_points(axes, points, names, colors=colors)

There are some hundred places around a point. Each name takes the nearest one that covers nothing.
Then each looks again, now that all others have a place. A name that has to go further away gets a
thin line back to its point.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from recipes_lib.report.labels import POINTS, text_width

NAME_SIZE = 9.5
HEIGHT = 1.2  # of a name, in sizes of its font
# In points of print:
MARK = 4.5  # half the width of what is kept free around a point
NEAR = 14.0  # a name within this of another point, and no nearer to its own, may be taken for it
STEPS = (8, 14, 22, 32, 44, 58, 74)  # how far from the middle of its point a name may stand
LED = 12  # a name further away than this gets a line to its point
EDGE = 3.0  # what is kept free inside the axes

# Where a name stands, seen from its point: to the right first, because we read that way.
SIDES = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))
SIDES += ((1, 0.5), (1, -0.5), (-1, 0.5), (-1, -0.5), (0.5, 1), (0.5, -1), (-0.5, 1), (-0.5, -1))
PIECES = 80  # of a line that names keep away from
LED_PIECES = 24  # of a line from a name to its point
ROUNDS = 4  # how often each name looks for a place
ORDERS = 16  # in which the names choose

# What a place costs, beside its distance:
OUTSIDE = 10_000.0  # to leave the axes
COVERED = 1000.0  # each name or point that is covered
ON_A_LINE = 16.0  # each piece of a line that is covered
CROSSED = 16.0  # each piece of the line to its own point that runs through something
TAKEN_FOR = 60.0  # each other point that is as near

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
        for number, side in enumerate(SIDES):
            # The nearest edge of the name is `step` away from the point.
            centre = middle + np.array(side) * (step * dots + half)
            # A worse side is worth less than the next step.
            yield np.concatenate([centre - half, centre + half]), step + number / 3


def _valued(
    box: Boxes, step: float, others: np.ndarray, pieces: Boxes, panel: Boxes, dots: float
) -> _Place:
    """A place with its cost against all that does not move: points, lines, the edge of the axes."""
    boxes = box[None]
    cost = COVERED * _counts(boxes, _around(others, MARK * dots))[0]
    cost += TAKEN_FOR * _counts(boxes, _around(others, min(step, NEAR) * dots))[0]
    cost += ON_A_LINE * _counts(boxes, pieces)[0]
    if (box[:2] < panel[:2]).any() or (box[2:] > panel[2:]).any():
        cost += OUTSIDE
    return _Place(box, step, cost + step)


def _counts(boxes: Boxes, others: Boxes) -> np.ndarray:
    """How many of the others [M, 4] each of the boxes [N, 4] covers in part, [N]."""
    boxes = boxes[:, None]  # [N, 1, 4], compared with [M, 4]
    beside = (boxes[..., 2] <= others[:, 0]) | (boxes[..., 0] >= others[:, 2])
    above = (boxes[..., 3] <= others[:, 1]) | (boxes[..., 1] >= others[:, 3])
    return (~(beside | above)).sum(axis=1)


def _chosen(
    possible: Sequence[Sequence[_Place]], middles: np.ndarray, pieces: Boxes, *, dots: float
) -> list[_Place]:
    """A place for each name, such that they cover little of each other.

    Who chooses first matters. So several orders are tried, and the one that costs least is taken.
    """
    marks = _around(middles, MARK * dots)
    numbers = list(range(len(possible)))
    shuffle = random.Random(0).shuffle  # the same points give the same picture
    best: dict[int, _Place] = {}
    least = np.inf
    for _ in range(ORDERS):
        chosen: dict[int, _Place] = {}
        for _ in range(ROUNDS):
            for number in numbers:
                chosen.pop(number, None)  # it is not in its own way
                around = _surroundings(chosen, middles, marks, pieces, of=number)
                chosen[number], _ = _cheapest(possible[number], middles[number], around)
        total = 0.0
        for number in numbers:
            others = {other: place for other, place in chosen.items() if other != number}
            around = _surroundings(others, middles, marks, pieces, of=number)
            total += _cheapest([chosen[number]], middles[number], around)[1]
        if total < least:
            least = total
            best = chosen
        shuffle(numbers)
    return [best[number] for number in range(len(possible))]


class _Around(NamedTuple):
    """What a name should keep away from: names, their lines, and what does not move."""

    names: Boxes
    ways: Boxes
    fixed: Boxes


def _surroundings(
    chosen: dict[int, _Place], middles: np.ndarray, marks: Boxes, pieces: Boxes, *, of: int
) -> _Around:
    ways = [_way(place, middles[other]) for other, place in chosen.items()]
    return _Around(
        names=_boxes([place.box for place in chosen.values()]),
        ways=np.concatenate([np.zeros((0, 4)), *ways]),
        fixed=np.concatenate([np.delete(marks, of, axis=0), pieces]),
    )


def _boxes(found: Sequence[Boxes]) -> Boxes:
    """Several boxes as one array; [0, 4] for none."""
    return np.array(found).reshape(-1, 4)


def _cheapest(
    places: Sequence[_Place], middle: np.ndarray, around: _Around
) -> tuple[_Place, float]:
    """The place that costs least beside what is around it, and what it costs."""
    boxes = _boxes([place.box for place in places])
    costs = np.array([place.cost for place in places])
    costs += COVERED * _counts(boxes, around.names) + CROSSED * _counts(boxes, around.ways)
    in_the_way = np.concatenate([around.names, around.fixed])
    cheapest = places[0]
    least = np.inf
    for number in np.argsort(costs, kind="stable"):
        if costs[number] >= least:  # and so do all others
            break
        crossed = _counts(_way(places[number], middle), in_the_way).sum()
        cost = costs[number] + CROSSED * crossed
        if cost < least:
            least = cost
            cheapest = places[number]
    return cheapest, least


def _way(place: _Place, middle: np.ndarray) -> Boxes:
    """The line from a name to its point, as small boxes; none for a name beside its point."""
    if place.step <= LED:
        return np.zeros((0, 4))
    begin = (place.box[:2] + place.box[2:]) / 2
    return _around(_between(begin, middle, LED_PIECES), 1.0)


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
