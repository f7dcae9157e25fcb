"""Size against quality of files: which ones are worth having.

    points = [SizeError("fp32", 2_900_000, accuracy=0.98)]
    points.append(SizeError("int8", 800_000, accuracy=0.97))
    size_error_chart(points)

Both axes grow with what is bad: bytes to the right, wrong answers or perplexity upwards. Nothing
that lies to the right of a point and above it is worth having. A thin line joins the rest. Points
that would cover each other are one point with both names.

How many answers are wrong depends on the images that were asked, too. A band shows how far the
first point could be off for that reason, so that nobody reads chance as a price.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from recipes_lib.core.checks import check_number, check_share, check_whole
from recipes_lib.report.figure import WIDTH, Key, blank_figure, faint, muted, page
from recipes_lib.report.point_labels import name_points
from recipes_lib.report.size_axes import draw_front, set_scales, worth_having
from recipes_lib.report.style import RECIPE, REFERENCE

MEGABYTE = 10**6
DEVIATIONS = 1.96  # of a normal distribution: 95 % of it lies between minus and plus as many
SAME_PLACE = 1.02  # files whose sizes differ by less than this factor cover each other on paper


@dataclass(frozen=True)
class SizeError:
    """A file of so many bytes, and an accuracy (0 to 1) or a perplexity; a chart has one kind.

    Raises ValueError for both or none of them, and for numbers that cannot be.
    """

    name: str
    file_bytes: float
    accuracy: float | None = None
    perplexity: float | None = None

    def __post_init__(self) -> None:
        check_number(file_bytes=self.file_bytes, above=0)
        if (self.accuracy is None) == (self.perplexity is None):
            raise ValueError("a point has one quality: give either accuracy= or perplexity=")
        if self.accuracy is not None:
            check_share(accuracy=self.accuracy)
        else:
            check_number(perplexity=self.perplexity, above=0)

    @property
    def megabytes(self) -> float:
        """Of the file."""
        return self.file_bytes / MEGABYTE

    @property
    def error(self) -> float:
        """What should be small: wrong answers in per cent, or the perplexity."""
        if self.accuracy is not None:
            return 100 * (1 - self.accuracy)
        return self.perplexity


@page()
def size_error_chart(
    points: Sequence[SizeError],
    *,
    leave_out: Collection[str] = (),
    tested: int | None = None,
    title: str | None = None,
    source: str | None = None,
) -> Any:
    """Draw what is wrong against the size of the file, with a name beside each point.

    Args:
        points: the first is what the others are compared with: a line goes through its quality.
        leave_out: names of points that only stretch an axis; a line above the chart says so.
        tested: how many images (or other questions) the accuracies were counted on. It draws the
            band of chance around the first point. None: no band.
        title: the message.
        source: where the numbers are from; by default this machine and today.
    Raises ValueError if there are no points, for points of two kinds, for `tested` below one or
    beside a perplexity, and for a name to leave out that no point has, or that the first has.
    """
    points = _without(points, leave_out)
    key = [Key("no smaller file is as good", REFERENCE, "—")]
    if points:
        key.append(Key(f"as good as: {points[0].name}", REFERENCE, "dashes"))
    band = None
    if tested is not None and points:
        band = chance(points[0], tested)
        key.append(Key(f"95 % range of chance of {tested:,} answers", faint(), "square"))
    if leave_out:
        key.append(Key(f"not drawn: {', '.join(leave_out)}", muted(), "×"))
    figure, axes = blank_figure(
        points, (WIDTH, 3.9), title=title or "What a smaller file costs", source=source, key=key
    )
    kinds = {point.accuracy is None for point in points}
    if len(kinds) > 1:
        raise ValueError("some points have an accuracy and some a perplexity: give one chart each")
    words = "wrong answers, %"
    if kinds == {True}:
        words = "perplexity (lower is better)"
    axes.set(xlabel="file, MB (millions of bytes)", ylabel=words)
    heaps = _in_one_place(points)
    points = [heap[0] for heap in heaps]
    places = [_place(point) for point in points]
    level = points[0].error
    corners = list(places)
    if band is not None:
        corners += [(points[0].megabytes, wrong) for wrong in band]
        axes.axhspan(*band, color=faint(), alpha=0.5, linewidth=0, zorder=0)
    set_scales(axes, corners)
    axes.axhline(level, color=REFERENCE, linestyle="--", linewidth=1, zorder=1)
    front = [_place(point) for point in worth_having(points, _place)]
    lines = draw_front(axes, front, color=REFERENCE)
    colors = []
    for point in points:
        color = muted() if point is points[0] else RECIPE
        axes.plot([point.megabytes], [point.error], "o", color=color, markersize=7, zorder=3)
        colors.append(color)
    left, right = axes.get_xlim()
    lines.append(((left, level), (right, level)))
    names = [_joined_names(heap) for heap in heaps]
    name_points(axes, places, names, colors=colors, lines=lines)
    return figure


def chance(point: SizeError, tested: int) -> tuple[float, float]:
    """Per cents of wrong answers: where a network as good as `point` is 95 times in 100.

    A network that is wrong with probability p on any image is wrong on a share of `tested` images
    whose standard deviation is sqrt(p (1 - p) / tested). Raises ValueError for a point with a
    perplexity, and for `tested` below one.
    """
    check_whole(tested=tested)
    if point.accuracy is None:
        raise ValueError(
            f"tested={tested}: {point.name} has a perplexity, and this band is one of wrong "
            f"answers: leave out tested="
        )
    wrong = 1 - point.accuracy
    deviation = math.sqrt(wrong * (1 - wrong) / tested)
    return (
        100 * max(0.0, wrong - DEVIATIONS * deviation),
        100 * min(1.0, wrong + DEVIATIONS * deviation),
    )


def _joined_names(heap: Sequence[SizeError]) -> str:
    return " · ".join(point.name for point in heap)


def _without(points: Sequence[SizeError], leave_out: Collection[str]) -> list[SizeError]:
    if isinstance(leave_out, str):
        raise ValueError(f"leave_out={leave_out!r}: give a list of names")
    names = [point.name for point in points]
    for name in leave_out:
        if name not in names:
            raise ValueError(f"leave_out has {name!r}: the points are {', '.join(names)}")
        if name == names[0]:
            raise ValueError(f"leave_out has {name!r}: the others are compared with it, so keep it")
    return [point for point in points if point.name not in leave_out]


def _in_one_place(points: Sequence[SizeError]) -> list[list[SizeError]]:
    """Points of the same quality and nearly the same size together, the others alone."""
    heaps: list[list[SizeError]] = []
    for point in points:
        for heap in heaps:
            sizes = (heap[0].file_bytes, point.file_bytes)
            if heap[0].error == point.error and max(sizes) < SAME_PLACE * min(sizes):
                heap.append(point)
                break
        else:
            heaps.append([point])
    return heaps


def _place(point: SizeError) -> tuple[float, float]:
    return point.megabytes, point.error
