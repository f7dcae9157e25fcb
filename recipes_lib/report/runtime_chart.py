"""The same model in several programs: time for one image or one token, and the file that it needs.

    runtime_chart([Runtime("eager", 0.0021, 2_900_000), Runtime("ExecuTorch", ...)])

A bar per program and format: its length is the time, the label beside it has the size of the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from recipes_lib.core.checks import check_number
from recipes_lib.report.bars import BAR, Slots, bar_colors, draw_whisker, write_labels
from recipes_lib.report.edge_ladder_text import megabytes, milliseconds
from recipes_lib.report.figure import WIDTH, blank_figure, page


@dataclass(frozen=True)
class Runtime:
    """A program that runs a file: seconds of one image or token, with the range of its turns."""

    name: str
    seconds: float
    file_bytes: int
    low: float | None = None
    high: float | None = None
    group: str = ""

    def __post_init__(self) -> None:
        check_number(seconds=self.seconds, file_bytes=self.file_bytes, above=0)


@page()
def runtime_chart(
    runtimes: Sequence[Runtime],
    *,
    title: str | None = None,
    heading: str = "time for one image, one thread",
    source: str | None = None,
) -> Any:
    """Draw the time of each program, with its file's size.

    Args:
        runtimes: the first is what the others are compared with.
        heading: what the bars are.
        title: the message.
        source: where the numbers are from; by default this machine and today.
    Raises ValueError if there is nothing to draw.
    """
    slots = Slots([asdict(runtime) for runtime in runtimes])
    figure, axes = blank_figure(
        runtimes,
        (WIDTH, slots.inches),
        title=title or "The same model in several programs",
        source=source,
        bars=True,
    )
    seconds = [runtime.seconds for runtime in runtimes]
    axes.barh(slots.places, seconds, height=BAR, color=bar_colors(len(runtimes)))
    labels = [f"{milliseconds(each.seconds)} · {megabytes(each.file_bytes)}" for each in runtimes]
    ends = list(seconds)
    for number, (runtime, place) in enumerate(zip(runtimes, slots.places, strict=True)):
        if runtime.low is not None and runtime.high is not None:
            draw_whisker(axes, runtime.low, runtime.seconds, runtime.high, place)
            ends[number] = max(runtime.high, runtime.seconds)
    slots.write_names(axes)
    write_labels(axes, slots, ends, labels, heading=heading)
    return figure
