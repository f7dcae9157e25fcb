"""Names of files, checked before a long piece of work ends in an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def check_file(*, example: str, **given: Any) -> None:
    """Each of `given` is the name of a file that can be written, with the ending of `example`.

    Its folder is made. Raises ValueError for another ending, and what Python raises for a place
    where no folder can be.
    """
    ending = Path(example).suffix
    for name, value in given.items():
        path = Path(value)
        if path.suffix != ending or path.is_dir():
            raise ValueError(
                f"{name}={str(value)!r}: give the name of a file that ends in {ending}, such as "
                f'"{example}"'
            )
        path.parent.mkdir(parents=True, exist_ok=True)


def check_existing_file(*, made_by: str, **given: Any) -> None:
    """Each of `given` is the name of a file that is there; `made_by` names what makes one."""
    for name, value in given.items():
        if not Path(value).is_file():
            raise ValueError(f"{name}={str(value)!r} is no file: write it with {made_by}")
