"""The longest sequence that fits into a memory: predicted by arithmetic, found by bisection.

    def predicted_peak(tokens):
        return plain_step(model, rows=1, length=tokens).peak     # core.predict.equation

    expected = predicted_longest(predicted_peak, limit_bytes=4 * GIB)
    found = search(arrange, start=512, limit_bytes=4 * GIB)      # it does not know `expected`

On a GPU the search takes real steps. On a CPU, where a step of so many tokens takes minutes, it
takes *dry* ones (`core.measure.dry_run`): the same operators on tensors without data, counted by
the same account. So there the arithmetic and the search are two independent answers.
`report.ladders.length` keeps both.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from recipes_lib.core.measure import PeakMemory, dry_run
from recipes_lib.core.measure.machine import machine

LONGEST = 2**30  # tokens: beyond it indices of 32 bits end
SHORT = 16  # tokens of the first step of a search
FURTHEST = 8  # times what fits: with few tokens the bytes hardly grow, and a line says nothing


@dataclass(frozen=True)
class Search:
    """The longest sequence that fits, in tokens.

    `peaks` holds the bytes of every length that was tried; None stands for one that ran out of
    memory.
    """

    tokens: int
    limit_bytes: int
    peaks: dict[int, int | None] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        """Bytes of a step at the longest length."""
        return self.peaks[self.tokens]

    @property
    def crossing(self) -> float:
        """At which length the bytes reach the limit: what a prediction is compared with.

        That is on the straight line between the longest length that fits and the next one tried
        above it. If nothing is known of the bytes up there, it is the longest that fits.
        """
        longer = [tokens for tokens in self.peaks if tokens > self.tokens]
        if not longer:
            return self.tokens
        above = min(longer)
        if self.peaks[above] is None:  # it ran out of memory
            return self.tokens
        return _crossing(self.tokens, self.peak_bytes, above, self.peaks[above], self.limit_bytes)


def _crossing(first: int, first_bytes: int, second: int, second_bytes: int, limit: int) -> float:
    """At which length the line through two lengths and their bytes meets the limit."""
    share = (limit - first_bytes) / (second_bytes - first_bytes)
    return first + share * (second - first)


# --- by arithmetic --------------------------------------------------------------------------------


def predicted_longest(peak: Callable[[int], int], *, limit_bytes: int) -> int:
    """The largest number of tokens with `peak(tokens) <= limit_bytes`, by bisection.

    Raises ValueError if not even two tokens fit, of which the second is predicted from the first.
    """
    if peak(2) > limit_bytes:
        raise ValueError(
            f"limit_bytes={limit_bytes:,}: two tokens are predicted to take {peak(2):,} "
            f"bytes, most of it weights and states: shrink those first (LoRA, 8-bit states)"
        )
    lengths = range(2, LONGEST)
    fitting = bisect.bisect_right(lengths, limit_bytes, key=peak)
    return lengths[fitting - 1]


# --- by trying ------------------------------------------------------------------------------------


def find_longest(
    peak: Callable[[int], int],
    *,
    limit_bytes: int,
    start: int,
    resolution: float = 0.01,
    known: Mapping[int, int] | None = None,
    most: int = LONGEST,
) -> Search:
    """Bisect for the longest sequence whose step stays within `limit_bytes`, from a guess `start`.

    Args:
        peak: takes a step of so many tokens; gives its peak in bytes, or raises
            torch.OutOfMemoryError. Take a short step before, which makes the optimizer's states:
            the first length would be judged without them.
        resolution: stop when the shortest length that failed is at most this part above the
            longest that passed.
        known: lengths that need not be tried, with their bytes.
        most: the longest length to try; where it fits, it is the result.
    Raises ValueError if nothing fits.
    """
    peaks: dict[int, int | None] = dict(known or {})
    low = max((tokens for tokens in peaks if peaks[tokens] <= limit_bytes), default=0)
    high = min((tokens for tokens in peaks if peaks[tokens] > limit_bytes), default=most + 1)
    tokens = start
    # The guess is good, so the first step away from it is small, and each next one twice as large.
    stride = resolution
    sides = itertools.cycle((-1, 1, 0))
    while low < most and (high > most or high - low > max(1, resolution * low)):
        shorter = low
        try:
            peaks[tokens] = peak(tokens)
        except torch.OutOfMemoryError:
            peaks[tokens] = None
        if peaks[tokens] is not None and peaks[tokens] <= limit_bytes:
            low = max(low, tokens)
        else:
            high = tokens
        if low == 0:
            tokens = min(high - 1, math.ceil(high / (1 + stride)))
        elif high > most:
            further = low * (1 + stride)
            if low > shorter > 0:
                guess = _guess_length(shorter, low, peaks, limit_bytes)
                further = max(further, guess * (1 + stride / 2))
            # Rounding must not stop the walk: at least one token further.
            tokens = min(max(low + 1, math.floor(further)), most)
        else:
            tokens = _length_between(low, high, peaks, limit_bytes, next(sides) * resolution / 3)
        stride *= 2
    if low == 0:
        raise ValueError(f"limit_bytes={limit_bytes:,}: not even one token fits (tried: {peaks})")
    return Search(low, limit_bytes, peaks)


def _length_between(
    low: int, high: int, peaks: dict[int, int | None], limit_bytes: int, aside: float
) -> int:
    """The next length to try: `aside` of the line through both ends, or the middle.

    A little below and then a little above it, because that leaves the smallest bracket.
    """
    if aside == 0 or peaks[high] is None:
        return (low + high) // 2
    crossing = _crossing(low, peaks[low], high, peaks[high], limit_bytes)
    return min(max(round(crossing * (1 + aside)), low + 1), high - 1)


def _guess_length(
    shorter: int, longer: int, peaks: dict[int, int | None], limit_bytes: int
) -> float:
    """The next length: where the line through two that fit meets the limit, not too far away."""
    furthest = FURTHEST * longer
    if peaks[longer] <= peaks[shorter]:
        return furthest
    crossing = _crossing(shorter, peaks[shorter], longer, peaks[longer], limit_bytes)
    return min(crossing, furthest)


def peak_of(
    step: Callable[[int], Any], clear: Callable[[], Any], *, limit_bytes: int | None = None
) -> Callable[[int], int]:
    """The `peak` for `find_longest`: the bytes of `step(tokens)`.

    `clear` frees what a step that ran out of memory left. Inside `dry_run` give no limit: nothing
    runs out there, and the peak of a length that is too long is known as well.
    """

    def peak(tokens: int) -> int:
        try:
            with PeakMemory(limit_bytes=limit_bytes) as memory:
                step(tokens)
        except torch.OutOfMemoryError:
            clear()  # gradients of an interrupted backward, for instance
            raise
        return memory.peak

    return peak


def search(
    arrange: Callable[[], tuple[Callable, Callable]],
    *,
    start: int,
    limit_bytes: int,
    resolution: float = 0.01,
    also: Iterable[int] = (),
) -> Search:
    """`find_longest` for a training step: real steps on a GPU, dry ones on a CPU.

    `Search.crossing` lies on the line between two lengths that are 1 % apart at most, so it is far
    more exact than they are. The search knows no prediction. Its first guess is where the line
    through the bytes of a short step and of one of `start` tokens meets the limit.

    Args:
        arrange: builds model and optimizer and returns (step, clear) of `peak_of`; called inside
            the dry run.
        start: a length that fits, such as the longest of the recipe before.
        also: lengths whose peaks are wanted beside those that the search tries.
    """
    on_cpu = machine().device == "cpu"
    with dry_run() if on_cpu else contextlib.nullcontext():
        step, clear = arrange()
        step(SHORT)  # makes the optimizer's states
        peak = peak_of(step, clear)
        known = {SHORT: peak(SHORT), start: peak(start)}
        guess = round(_guess_length(SHORT, start, known, limit_bytes))
        found = find_longest(
            peak, limit_bytes=limit_bytes, start=guess, resolution=resolution, known=known
        )
        for tokens in also:
            found.peaks[tokens] = peak(tokens)
    return found
