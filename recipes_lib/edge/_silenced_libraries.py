"""Keep away what libraries print while they work: from a terminal, and from a notebook.

Compilers and runtimes write on the two standard streams: warnings of Python, logs, and lines that
C++ prints past Python. Inside of `noise_to(path)` all of it goes to a file:

    with noise_to("runs/export.log"):
        export()

A program in C++ knows the streams by their numbers, 1 and 2. These numbers are made to point to the
file, and back. Both belong to the whole process: what another thread prints meanwhile goes to the
file as well.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO

STREAMS = (1, 2)  # the numbers of standard output and standard error


@contextlib.contextmanager
def noise_to(path: Path | str | None = None) -> Iterator[IO[str]]:
    """Everything printed inside of the block goes to the end of the file `path`; yields that file.

    Warnings of Python are not shown at all. Errors pass through unchanged.

    Args:
        path: a text file, made with its folder where it does not exist. None: a file that is
            deleted when the block ends.
    """
    with _open_log(path) as log, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = (sys.stdout, sys.stderr)
        for stream in before:
            stream.flush()  # what was printed before must not appear in the file
        copies = [os.dup(number) for number in STREAMS]
        for number in STREAMS:
            os.dup2(log.fileno(), number)
        sys.stdout = log
        sys.stderr = log
        _move_handlers(before[1], log)
        root = logging.getLogger()
        handlers, level = list(root.handlers), root.level
        try:
            yield log
        finally:
            root.handlers[:] = handlers  # an import of ExecuTorch gives it others
            root.setLevel(level)
            # A handler that was made inside of the block would write to a closed file from now on.
            _move_handlers(log, before[1])
            sys.stdout, sys.stderr = before
            log.flush()
            for number, copy in zip(STREAMS, copies):
                os.dup2(copy, number)
                os.close(copy)


def _open_log(path: Path | str | None) -> IO[str]:
    """The file to which libraries print: of this name, or one that goes when it is closed."""
    if path is None:
        return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("a", encoding="utf-8", errors="replace")


def _move_handlers(old: IO[str], new: IO[str]) -> None:
    """Loggers remember their stream: all that write to `old` write to `new` from now on."""
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for logger in loggers:
        for handler in getattr(logger, "handlers", []):  # a placeholder of a name has none
            if vars(handler).get("stream") is old:
                handler.setStream(new)
