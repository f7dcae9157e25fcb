"""Ranks that stay alive: several functions on the same processes, one after the other.

    with RankPool(ranks=4) as pool:
        loss = pool.run(train, steps=10)        # what train(steps=10) returns on rank 0
        size = pool.run(bytes_per_rank)         # the same four processes

To start a process and to import PyTorch takes seconds, and a test or a cell of a notebook often
takes less. A pool pays for the start once, at its first call:

    this process  --task 1, task 2, …-->  rank 0   rank 1   rank 2   rank 3
                  <--an answer of each--        \\________|_______|_______/
                                           collectives: gloo on CPUs, NCCL on GPUs

All ranks call the same function, and find out by `torch.distributed.get_rank()` who they are.
What usually goes wrong in such programs, and what happens here:

    one rank fails               the others would wait in a collective for minutes. Here they are
                                 ended within seconds, and the error holds every traceback.
    a rank is killed             the same, and the error says by which signal.
    ranks wait for each other    `timeout` ends them, and the error says where each of them was.
    this process is killed       a rank notices that nobody holds its input any more, and ends.
    two pools at once            no port is chosen: ranks find each other through a file.
    a machine in a network       ranks listen on the loopback address only.

After an error the next call starts new ranks. One error leaves them alive: a ValueError that all
ranks raise alike. It comes from wrong arguments, before anything has happened.

Source: PyTorch, "Distributed communication package" (file initialization, GLOO_SOCKET_IFNAME).
"""

from __future__ import annotations

import pickle
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from recipes_lib.core.checks import check_choice, check_number, check_whole
from recipes_lib.core.measure.machine import machine
from recipes_lib.core.ranks.rank_process import JOINED, RankProcess

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
START_SECONDS = 300.0  # for the imports of all ranks, on a machine that is busy
GRACE_SECONDS = 2.0  # for the other ranks to report an error of their own
POLL_SECONDS = 0.01
LONGEST_POLL = 1.0  # more has passed if the machine slept, and the ranks did so, too


class RankError(RuntimeError):
    """One or more ranks failed; the text holds the traceback of each."""


class RankPool:
    """N processes that call the functions they are given; they start at the first call.

    Args:
        ranks: how many processes.
        device: "cpu" (gloo) or "cuda" (NCCL, a GPU for each rank); by default this machine's.
        threads: of PyTorch in each rank.

    Raises ValueError for numbers below 1, and for more ranks than GPUs.
    """

    def __init__(self, *, ranks: int = 2, device: str | None = None, threads: int = 1) -> None:
        check_whole(ranks=ranks, threads=threads)
        if device is None:
            device = machine().device
        check_choice(BACKENDS, device=device)
        _require_gpus(device, ranks)
        self.ranks = ranks
        self.device = device
        self.threads = threads
        self._processes: list[RankProcess] = []
        self._folder: tempfile.TemporaryDirectory | None = None
        self._number = JOINED
        # A pool that is dropped without `close` ends its ranks, too.
        weakref.finalize(self, _end, self._processes)

    def run(
        self, function: Callable[..., Any], /, *, timeout: float = 60.0, **arguments: Any
    ) -> Any:
        """Call `function(**arguments)` on all ranks, and return what rank 0 returns.

        What the ranks print appears here, with the number of the rank in front of all but rank
        0's. Each call starts with the same random seed. Ranks import a module once: after a change
        of its text, `close()` lets the next call see the new one.

        Args:
            function: of a module that can be imported. One that is written in a notebook cannot be.
            timeout: seconds for this call. The start of the ranks does not count.
            arguments: anything that can be pickled; the function gets copies.

        Raises RankError with all tracebacks if a rank fails, ValueError if all ranks raise the same
        one, TimeoutError after `timeout` seconds, and ValueError for a function that a new process
        cannot import.
        """
        check_number(above=0, timeout=timeout)
        _require_importable(function)
        call = pickle.dumps((function, arguments))
        try:
            if not self._alive():
                self._start()
            self._number += 1
            # Pickled inside of the task: the call can be read only when `path` is set.
            task = self._path / f"task-{self._number}"
            _write(task, {"path": sys.path, "call": call})
            for process in self._processes:
                process.send(self._number)
            self._wait(timeout)
            task.unlink()
        except BaseException:  # of a keyboard, too: nobody would ever read the answer
            self.close()
            raise
        return self._result()

    def close(self) -> None:
        """End the ranks and all that they have started. The next call starts new ones."""
        _end(self._processes)
        if self._folder is not None:
            self._folder.cleanup()
        self._folder = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- starting, waiting, and what went wrong ---------------------------------------------------

    @property
    def _path(self) -> Path:
        return Path(self._folder.name)

    def _alive(self) -> bool:
        states = [process.exit_code is None for process in self._processes]
        return bool(states) and all(states)

    def _start(self) -> None:
        """Start the processes, and wait until they have found each other."""
        self.close()
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._number = JOINED
        setup = {
            "ranks": self.ranks,
            "device": self.device,
            "backend": BACKENDS[self.device],
            "threads": self.threads,
        }
        _write(self._path / "setup", setup)
        for rank in range(self.ranks):
            process = RankProcess(self._path, rank, threads=self.threads, device=self.device)
            self._processes.append(process)
        self._wait(START_SECONDS)
        self._result()

    def _wait(self, timeout: float) -> None:
        """Return when all ranks have answered, or soon after the first that failed."""
        waited = 0.0
        since_failure = 0.0
        last = time.monotonic()
        while True:
            for process in self._processes:
                process.show()
            number = self._number
            waiting = [process for process in self._processes if process.answer(number) is None]
            if not waiting or since_failure > GRACE_SECONDS:
                break
            if waited > timeout:
                raise TimeoutError(self._who_still_runs(waiting, timeout))
            time.sleep(POLL_SECONDS)
            passed = min(time.monotonic() - last, LONGEST_POLL)
            last = time.monotonic()
            waited += passed
            if any(process.failed(number) for process in self._processes):
                since_failure += passed
        for process in self._processes:
            process.show_rest()

    def _result(self) -> Any:
        """What rank 0 returned. Raises what went wrong, and ends the ranks then."""
        failed = [process for process in self._processes if process.failed(self._number)]
        if not failed:
            return pickle.loads(self._processes[0].answer(self._number).result)
        self._raise_value_error_of_all()
        reports = [
            f"--- rank {process.rank}:\n{process.report(self._number).rstrip()}"
            for process in failed
        ]
        self.close()
        count = f"{len(failed)} of {self.ranks} ranks failed"
        raise RankError("\n".join([count, *reports]))

    def _raise_value_error_of_all(self) -> None:
        """A mistake in the arguments is found by every rank alike: say it once, and go on."""
        answers = [process.answer(self._number) for process in self._processes]
        errors = [answer.error for answer in answers if answer is not None]
        if len(errors) < self.ranks or None in errors:
            return
        kinds_and_texts = {(kind, text) for kind, text, _ in errors}
        if len(kinds_and_texts) == 1:
            ((kind, text),) = kinds_and_texts
            if kind == "ValueError":
                _, _, trace = errors[0]
                raise ValueError(text) from RankError(f"--- rank 0:\n{trace.rstrip()}")

    def _who_still_runs(self, waiting: list[RankProcess], timeout: float) -> str:
        names = [process.rank for process in waiting]
        places = [f"--- rank {process.rank} was at:\n{process.stack()}" for process in waiting]
        message = (
            f"ranks {names} of {self.ranks} still ran after {timeout:g} s, and were ended: "
            f"give a longer `timeout`, or see below whether they wait for each other"
        )
        return "\n".join([message, *places])


def _end(processes: list[RankProcess]) -> None:
    """End all, and forget them."""
    while processes:
        processes.pop().end()


def _write(file: Path, content: Any) -> None:
    file.write_bytes(pickle.dumps(content))


# --- before the start -----------------------------------------------------------------------------


def _require_importable(function: Callable[..., Any]) -> None:
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", repr(function))
    if module in (None, "__main__") or "<" in name:
        raise ValueError(
            f"{name} is written in a notebook, a script or another function, where a "
            f"new process cannot find it: move it to the top of a module and import it"
        )


def _require_gpus(device: str, ranks: int) -> None:
    if device == "cuda" and ranks > torch.cuda.device_count():
        raise ValueError(
            f"ranks={ranks}: this machine has {torch.cuda.device_count()} GPU(s), and NCCL wants "
            f"one for each rank; give fewer ranks, or device='cpu'"
        )
