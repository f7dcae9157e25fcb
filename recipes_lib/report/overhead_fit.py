"""Where the time of a token goes: a fixed part, and the time to read the weights.

    fit = fit_overhead([(0.27e9, 0.0131), (0.54e9, 0.0192), (1.08e9, 0.0325)])
    fit.overhead                what a token costs before any weight is read, in seconds
    fit.bandwidth               how fast the weights are read, in bytes per second
    fit.overhead_share(0.135e9) the part of a token's time that no smaller format can save

    seconds = overhead + bytes / bandwidth

To write one token, a model reads each of its weights once. That takes bytes / bandwidth, and it
shrinks with the format of the weights. What it does besides (Python, the start of each operator,
attention over earlier tokens) stays as it is. Hence a small model gains less from small weights
than a large one: more of its time is the fixed part.

The points should differ in nothing but their bytes: one kernel, and one number of layers in several
widths. More layers have a larger fixed part, and another kernel reads at another speed.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class OverheadFit:
    """The line `seconds = overhead + bytes / bandwidth`.

    A negative `overhead` means that the line does not fit: small sizes are read faster, as from a
    cache.
    """

    overhead: float
    bandwidth: float

    def seconds(self, size: float) -> float:
        """The time of a token that reads `size` bytes, by the line."""
        return self.overhead + size / self.bandwidth

    def overhead_share(self, size: float) -> float:
        """The part of a token's time that is the fixed part."""
        return self.overhead / self.seconds(size)


def fit_overhead(points: Sequence[tuple[float, float]]) -> OverheadFit:
    """Fit the fixed part of a token's time and that of reading, by least squares.

    Args:
        points: (bytes that a token reads, seconds that it takes). Give three or more: a line goes
            through any two exactly, and says nothing of its error.
    Raises ValueError if the time does not grow with the bytes.
    """
    slope, overhead = statistics.linear_regression(*zip(*points, strict=True))
    if slope <= 0:
        raise ValueError(
            f"the time does not grow with the bytes (slope {slope:.2e} s per byte): measure again "
            f"in turns on a quiet machine, with sizes that differ more"
        )
    return OverheadFit(overhead=overhead, bandwidth=1 / slope)
