"""What a terminal shows while a command works. A file or a pipe gets plain lines, or none."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)


@contextlib.contextmanager
def counting(verb: str, *, total: int) -> Iterator[Callable[[str], None]]:
    """A bar for work of `total` parts: call what it gives with the name of each part as it begins.

    Nothing is drawn while a part is at work: a thread that draws would disturb the clock.
    """
    if not sys.stdout.isatty():
        yield _plain_line(verb)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, transient=True, auto_refresh=False) as progress:
        # The first call begins part 1 and completes none, so the count starts below 0.
        task = progress.add_task(verb, total=total, completed=-1, visible=False)

        def announce(name: str) -> None:
            progress.update(task, description=f"{verb} {name}", visible=True)
            progress.advance(task)
            progress.refresh()

        yield announce


def _plain_line(verb: str) -> Callable[[str], None]:
    def announce(name: str) -> None:
        print(f"{verb} {name}", flush=True)

    return announce


@contextlib.contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """A turning wheel and the time gone by, below whatever is printed inside.

    Call what it gives with a few words on what is going on now: they stand beside the wheel.
    """
    if not sys.stdout.isatty():
        yield _say_nothing
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task(what, total=None)

        def announce(words: str) -> None:
            progress.update(task, description=words)

        yield announce


def _say_nothing(words: str) -> None:
    """A pipe has the lines that the command prints."""
