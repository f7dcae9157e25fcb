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
def working(what: str) -> Iterator[None]:
    """A turning wheel and the time gone by, below whatever is printed inside."""
    if not sys.stdout.isatty():
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, transient=True) as progress:
        progress.add_task(what, total=None)
        yield
