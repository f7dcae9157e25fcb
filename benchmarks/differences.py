"""A difference between two ways over several seeds: its mean, its range, and what it allows to say.

The seeds are paired: both ways of a seed began alike and saw the same text in the same order.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

LEAST = 3  # seeds, below which nothing is called better or worse


def spread(differences: Sequence[float], *, digits: int = 3) -> str:
    """The mean, and in brackets the smallest and the largest: "+0.013 (+0.001 to +0.027)"."""
    mean = f"{statistics.fmean(differences):+.{digits}f}"
    if len(differences) == 1:
        return mean
    return f"{mean} ({min(differences):+.{digits}f} to {max(differences):+.{digits}f})"


def verdict(losses: Sequence[float]) -> str:
    """What differences of a loss allow to say: "better", "worse", or that they decide nothing.

    A range that contains zero decides nothing, and so do fewer than three seeds.
    """
    if len(losses) < LEAST:
        return "too few seeds"
    if max(losses) < 0:
        return "better"
    if min(losses) > 0:
        return "worse"
    return "undecided"
