"""An export in another process, while the notebook goes on, its noise in a log.

    job = in_background(export_language_model, model=model, path="smollm2.pte")
    …                                             the next cells
    exported = job.result(timeout=600)            what the function returns, or its error

An export of a language model takes minutes of one core and gigabytes of memory, and prints hundreds
of lines, into `smollm2.pte.log`. One process beside the notebook does it; jobs wait for each other
there. In FAST mode a job is done before the next cell: with tiny models, another process would
spend most of its time on its imports.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from recipes_lib.core.measure.machine import fast


def in_background(function: Callable[..., Any], *, path: str | Path, **arguments: Any) -> Future:
    """Call `function(path=…, **arguments)` in another process, and go on.

    Args:
        function: of a module, such as `export_language_model`; it takes `path`, and writes there.
        arguments: what can be pickled: models, tensors, numbers, texts.
    Returns a Future, whose `result()` has the errors of `function`, too. What cannot be pickled is
    an error here.
    """
    path = Path(path).resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    if fast():
        done: Future = Future()
        done.set_result(function(path=path, **arguments))
        return done
    # A copy. The executor's own pickling would move the tensors into shared memory, in a thread and
    # at a time of its own, when the next cell may change them.
    return _process().submit(_work_in_process, function, path, pickle.dumps(arguments))


@functools.cache
def _process() -> ProcessPoolExecutor:
    """One process for exports in the background: from the first to the end of this one."""
    # Not a fork: this process has threads, of PyTorch and of the notebook.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(max_workers=1, mp_context=context, initializer=_begin_process)


def _begin_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # to interrupt a cell does not end the export
    torch.set_num_threads(1)  # the other core is the notebook's


def _work_in_process(function: Callable[..., Any], path: Path, copied: bytes) -> Any:
    """In the background: all that the process prints, libraries in C++ too, goes to the log."""
    with path.with_name(f"{path.name}.log").open("w") as log:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log.fileno(), stream.fileno())
    return function(path=path, **pickle.loads(copied))
