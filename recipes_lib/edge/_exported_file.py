"""What an export leaves behind: a model as one file, whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from recipes_lib.edge._delegated_operators import Delegation


@dataclass(frozen=True)
class ExportedFile:
    """A model as one exported file."""

    path: Path
    bytes: int
    seconds: float
    delegation: Delegation | None = None


@contextlib.contextmanager
def whole_or_none(path: Path) -> Iterator[Path]:
    """A place for an exported file, which gets the name `path` when the block ends without error.

    An export that is cut leaves nothing: the place is in a folder that is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="export-", dir=path.parent) as folder:
        unfinished = Path(folder, path.name)
        yield unfinished
        os.replace(unfinished, path)
