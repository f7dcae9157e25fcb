"""Checks of arguments, with one form of message: what was given, and what is allowed.

rank=0: give a whole number of 1 or more
dropout=1.5: give a number of 0 or more and below 1
mode='blok': choose one of block, selective
"""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Iterable
from pathlib import Path
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


def check_share(**given: Any) -> None:
    """Each of `given` is a share of a whole, from 0 to 1. Raises ValueError."""
    for name, value in given.items():
        if not 0 <= value <= 1:  # NaN is not between them either
            raise ValueError(f"{name}={value!r}: give a number from 0 to 1")


def check_choice(allowed: Iterable[Any], **given: Any) -> None:
    """Each of `given` is one of `allowed`. Raises ValueError."""
    choices = list(allowed)
    for name, value in given.items():
        if value not in choices:
            raise ValueError(f"{name}={value!r}: choose one of {', '.join(map(str, choices))}")


def check_file(*, example: str, **given: Any) -> None:
    """Each of `given` is the name of a file that can be written, as a text or a Path.

    Raises ValueError, before a long piece of work ends in an error: for a folder, a place below a
    file, a folder that cannot be made or written to, and another ending than that of `example`.
    """
    for name, value in given.items():
        if not isinstance(value, str | os.PathLike) or value == "":
            raise ValueError(f'{name}={value!r}: give the name of a file, such as "{example}"')
        path = Path(value)
        shown = f"{name}={str(value)!r}"
        if path.is_dir() or str(value).endswith(os.sep):
            raise ValueError(f'{shown} is a folder: give the name of a file, such as "{example}"')
        ending = Path(example).suffix
        if path.suffix != ending:
            raise ValueError(f"{shown}: give the name of a file that ends in {ending}")
        _check_place(shown, path)


def check_folder(**given: Any) -> None:
    """Each of `given` is the name of a folder that can be written, as a text or a Path.

    Raises ValueError, before a long piece of work ends in an error: for a file, a place below one,
    and a folder that cannot be made or written to.
    """
    for name, value in given.items():
        if not isinstance(value, str | os.PathLike) or value == "":
            raise ValueError(f'{name}={value!r}: give the name of a folder, such as "runs/first"')
        path = Path(value)
        shown = f"{name}={str(value)!r}"
        if path.exists() and not path.is_dir():
            raise ValueError(f"{shown} is a file: give the name of a folder")
        _check_place(shown, path / "a file of it")


def _check_place(shown: str, path: Path) -> None:
    """The folder of the file is there, or it can be made."""
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise ValueError(f"{shown} is a place below the file {folder}: give one in a folder")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{shown}: nobody may write into {folder} here, give another folder")


def check_existing_file(*, made_by: str, **given: Any) -> None:
    """Each of `given` is the name of a file that is there, as a text or a Path.

    Args:
        made_by: what makes such a file, for the message, such as "export_to_onnx".
    Raises ValueError.
    """
    for name, value in given.items():
        if not isinstance(value, str | os.PathLike) or value == "":
            raise ValueError(f"{name}={value!r}: give the name of a file, which {made_by} makes")
        path = Path(value)
        if path.is_dir():
            raise ValueError(
                f"{name}={str(value)!r} is a folder: give the name of a file, which {made_by} makes"
            )
        if not path.is_file():
            raise ValueError(f"{name}={str(value)!r} does not exist: write it with {made_by}")


def check_heads(q: Any, k: Any, v: Any, *, allowed: str) -> None:
    """Queries [B, H, S, E] go with keys and values [B, K, S, E], as attention takes them.

    Every head of keys serves the same number of heads of queries. Raises ValueError, which says
    with `allowed` what to give, in the letters of the caller.
    """
    fits = q.dim() == k.dim() == 4 and k.shape == v.shape
    fits = fits and len(k) == len(q) and k.shape[2:] == q.shape[2:]
    fits = fits and q.shape[1] % k.shape[1] == 0
    if not fits:
        raise ValueError(f"q {[*q.shape]}, k {[*k.shape]}, v {[*v.shape]}: give {allowed}")
