"""Quality, size and time of one file per row (notebook 06)."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from recipes_lib.core.measure import timed
from recipes_lib.report.ladder import Column, Ladder, Row
from recipes_lib.report.style import (
    SHARE,
    megabytes,
    milliseconds,
    three_digits,
)

SHORTEST = 0.05  # seconds: a shorter look at the clock says little, so the call is repeated
MOST_CALLS = 1000


class Calls:
    """A call that takes `units` images or tokens through a model. A turn is the fastest of as many
    as fill `SHORTEST` seconds, for one unit.
    """

    def __init__(self, run: Callable[[], Any], units: int) -> None:
        self._run = run
        self._units = units
        run()  # the first call makes buffers

    def __call__(self) -> dict[str, float]:
        """Seconds of a call for one image or token on this device, the fastest of some."""
        seconds: list[float] = []
        while sum(seconds) < SHORTEST and len(seconds) < MOST_CALLS:
            took, _ = timed(self._run)
            seconds.append(took)
        return {"seconds": min(seconds) / self._units}


class EdgeLadder(Ladder):
    """Quality, size and time of one file per row, compared with the first row of its group.

    A group is one task. `ratio` is the time over that of the first row, and `as_fast` the other way
    round. A row that is one link more than an earlier one is compared with that one as well:
    `climb(after="student")` brings `after_ratio`.
    """

    columns = (
        Column("accuracy", "right", "", "{:.1%}".format),
        Column("agreement", "same as first", "", SHARE),
        Column("predicted_bytes", "predicted", "B", megabytes),
        Column("file_bytes", "file", "B", megabytes),
        Column("share_of_first", "of first file", "", SHARE),
        Column("load_seconds", "time to load", "s", milliseconds),
        Column("peak_bytes", "added memory", "B", megabytes),
        Column("seconds", "time for one", "s", milliseconds),
        Column("as_fast", "times as fast", "×", three_digits),
        Column("ratio", unit="×"),
        Column("after"),
        Column("after_ratio", unit="×"),
    )
    in_groups = True

    def climb(
        self,
        name: str,
        run: Callable[[], Any],
        *,
        file: str | Path,
        accuracy: float | None = None,
        agreement: float | None = None,
        predicted_bytes: int | None = None,
        load_seconds: float | None = None,
        peak_bytes: int | None = None,
        units: int = 1,
        group: str = "",
        after: str | None = None,
    ) -> Row:
        """Say what the arithmetic expects, time a call, and add the row.

        Args:
            run: takes `units` images or tokens through the model; called again by `take_turns`.
            file: what is copied to the device.
            accuracy: share of right answers, 0 to 1; or else
            agreement: share of places where the likeliest answer is that of the first row.
            predicted_bytes: of the file, if there is a formula.
            load_seconds: from the file to a model that is ready.
            peak_bytes: what the model adds to the memory of a process.
            group: the heading above this row, and the task that it belongs to.
            after: the name of a row that this one changes in one thing.
        Raises ValueError for a name that is taken.
        """
        expected = ""
        if predicted_bytes is not None:
            expected = f"predicted file {megabytes(predicted_bytes)}"
        return super().climb(
            name,
            partial(Calls, run, units),
            expected=expected,
            group=group,
            file_bytes=os.path.getsize(file),
            predicted_bytes=predicted_bytes,
            load_seconds=load_seconds,
            peak_bytes=peak_bytes,
            after=after,
            accuracy=accuracy,
            agreement=agreement,
        )

    def derive(self, row: Row, first: Row) -> None:
        """The size and the speed of a file on a device, as parts of the first row's."""
        row.share_of_first = row.file_bytes / first.file_bytes
        row.as_fast = 1 / row.ratio
        if row.turns:
            row.set_range("as_fast", 1 / row.ratio, 1 / row.ratio_high, 1 / row.ratio_low)
        if row.after is not None:
            self.compare(row, "after_ratio", row.after)
