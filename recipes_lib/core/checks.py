"""Checks of arguments, with one form of message: what was given, and what is allowed.

rank=0: give a whole number of 1 or more
dropout=1.5: give a number of 0 or more and below 1
mode='blok': choose one of block, selective
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any


def check_whole(*, least: int = 1, most: int | None = None, **given: Any) -> None:
    """Each of `given` is a whole number from `least` to `most`: `check_whole(rank=rank, least=1)`.

    A bool is no number here, nor is 2.0: both come from a mistake. Raises ValueError.
    """
    allowed = f"a whole number of {least} or more"
    if most is not None:
        allowed = f"a whole number from {least} to {most}"
    for name, value in given.items():
        whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if not whole or value < least or (most is not None and value > most):
            raise ValueError(f"{name}={value!r}: give {allowed}")


def check_number(
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    **given: Any,
) -> None:
    """Each of `given` is a finite number inside the bounds. Raises ValueError.

    Args:
        above: each number must be larger than this.
        least: each number must be this, or larger.
        below: each number must be smaller.
    """
    bounds = []
    if above is not None:
        bounds.append(f"above {above:g}")
    if least is not None:
        bounds.append(f"of {least:g} or more")
    if below is not None:
        bounds.append(f"below {below:g}")
    allowed = " ".join(["a finite number", " and ".join(bounds)]).strip()
    for name, value in given.items():
        inside = isinstance(value, numbers.Real) and math.isfinite(value)
        inside = inside and (above is None or value > above)
        inside = inside and (least is None or value >= least)
        inside = inside and (below is None or value < below)
        if not inside:
            raise ValueError(f"{name}={value!r}: give {allowed}")


def check_choice(allowed: Iterable[Any], **given: Any) -> None:
    """Each of `given` is one of `allowed`. Raises ValueError."""
    choices = list(allowed)
    for name, value in given.items():
        if value not in choices:
            raise ValueError(f"{name}={value!r}: choose one of {', '.join(map(str, choices))}")
