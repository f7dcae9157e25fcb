"""Which rows of the data an optimizer step trains on, as a function of the step alone.

    step        0    1    2  |  3    4    5  |  6 …
    epoch            0       |       1       |  2
    rows     [7 2][5 0][1 4]   [0 3][6 1][2 7]         8 rows, 2 of them per step

No state has to be kept: a run that starts again at step 4 asks for the rows of step 4. So a
checkpoint needs the step only, and any number of processes can compute the same rows.
"""

from __future__ import annotations

import functools
import random

from recipes_lib.core.checks import check_whole


def rows_of_step(step: int, *, rows: int, rows_per_step: int, seed: int) -> list[int]:
    """The indices that optimizer step `step` (from 0) trains on.

    Every epoch has its own order, a function of the seed; the rows that do not fill a last step are
    left out of it.
    """
    check_whole(rows_per_step=rows_per_step, most=rows)
    steps_per_epoch = rows // rows_per_step  # whole ones
    epoch, within = divmod(step, steps_per_epoch)
    order = _order_of_epoch(epoch, rows, seed)
    return list(order[within * rows_per_step : (within + 1) * rows_per_step])


# Kept from step to step: for a million rows it takes longer than many a training step.
@functools.lru_cache(maxsize=2)
def _order_of_epoch(epoch: int, rows: int, seed: int) -> list[int]:
    # A generator of the epoch's own, so that no epoch depends on those before it.
    return random.Random(f"{seed} {epoch}").sample(range(rows), rows)
