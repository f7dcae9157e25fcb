"""A function on several ranks from a notebook or a test, with no process left behind.

    loss = launch(train, ranks=4, steps=10)         # what train(steps=10) returns on rank 0

Each rank is a process of its own. All of them call the same function, and find out by
`torch.distributed.get_rank()` who they are:

    this process  --starts-->  rank 0   rank 1   rank 2   rank 3
                                  \\________|________|_______/
                                   collectives: gloo on CPUs, NCCL on GPUs

What usually goes wrong in such programs, and what happens here:

    one rank fails               the others would wait in a collective for minutes. Here they are
                                 ended within seconds, and the error holds every traceback.
    a rank is killed             the same, and the error says by which signal.
    this process is killed       a rank notices that nobody holds its input any more, and ends.
    two launches at once         no port is chosen: ranks find each other through a file.
    a machine in a network       ranks listen on the loopback address only.

For several machines, and for runs that have to start again after a failure, use `torchrun`.

Source: PyTorch, "Distributed communication package" (file initialization, GLOO_SOCKET_IFNAME).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from recipes_lib.core.checks import check_choice, check_number, check_whole
from recipes_lib.core.machine import machine

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
LOOPBACK_NAMES = ("lo", "lo0")  # Linux, macOS
GRACE_SECONDS = 2.0  # for the other ranks to report an error of their own
POLL_SECONDS = 0.02
LINES_KEPT = 40  # of what a rank printed, for the report of one that was killed


class RankError(RuntimeError):
    """One or more ranks failed; the text holds the traceback of each."""


def launch(
    function: Callable[..., Any],
    *,
    ranks: int,
    device: str | None = None,
    timeout: float = 600.0,
    threads: int = 1,
    **arguments: Any,
) -> Any:
    """Call `function(**arguments)` on all ranks, and return what rank 0 returns.

    What the ranks print appears here, with the number of the rank in front of all but rank 0's.

    Args:
        function: of a module that can be imported. One that is written in a notebook cannot be.
        ranks: how many processes.
        device: "cpu" (gloo) or "cuda" (NCCL, a GPU for each rank); by default this machine's.
        timeout: seconds for the whole run. It also ends a collective that waits for nobody.
        threads: of PyTorch in each rank.
        arguments: anything that can be pickled; the function gets copies.
    Raises RankError with all tracebacks if a rank fails, ValueError if all ranks raise the same
    one, TimeoutError after `timeout` seconds, and ValueError for a function that a new process
    cannot import, for more ranks than GPUs, and for numbers out of range.
    """
    check_whole(ranks=ranks, threads=threads)
    check_number(above=0, timeout=timeout)
    if device is None:
        device = machine().device
    check_choice(BACKENDS, device=device)
    _require_importable(function)
    _require_gpus(device, ranks)
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        task = {
            "path": sys.path,
            "ranks": ranks,
            "device": device,
            "backend": BACKENDS[device],
            "timeout": timeout,
            "threads": threads,
            # Pickled by itself: it can be read only when `path` is set.
            "call": pickle.dumps((function, arguments)),
        }
        (folder / "task").write_bytes(pickle.dumps(task))
        processes: list[RankProcess] = []
        try:
            for rank in range(ranks):
                processes.append(RankProcess(folder, rank, threads))
            _wait(processes, timeout=timeout)
            _raise_errors(processes)
            return pickle.loads((folder / "result").read_bytes())
        finally:
            for process in processes:
                process.end()


class RankProcess:
    """One rank: its process, what it printed last, and its error if it had one."""

    def __init__(self, folder: Path, rank: int, threads: int) -> None:
        self.rank = rank
        self.folder = folder
        self.last_lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "recipes_lib.core.launch_rank", str(folder), str(rank)],
            # Nothing is written into it. Its end tells the rank that this process is gone.
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=_environment(threads),
            # A session of its own, which is ended as a whole, with workers that a rank has started.
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._relay, daemon=True)
        self._reader.start()

    def _relay(self) -> None:
        """Print here what the rank prints."""
        for line in self._process.stdout:
            self.last_lines.append(line)
            mark = ""
            if self.rank > 0:
                mark = f"[rank {self.rank}] "
            print(f"{mark}{line}", end="", flush=True)

    @property
    def exit_code(self) -> int | None:
        """0, another number, minus a signal, or None while it runs."""
        return self._process.poll()

    def error(self) -> Any:
        """What the rank reported: (type, text, traceback); None if it reported nothing."""
        file = self.folder / f"error-{self.rank}"
        if not file.exists():
            return None
        return pickle.loads(file.read_bytes())

    def report(self) -> str:
        """The traceback, or how the process ended and what it printed last."""
        reported = self.error()
        if reported is not None:
            return reported[2]
        self._reader.join(timeout=1)
        code = self.exit_code
        how = f"ended with code {code} and reported nothing"
        if code is not None and code < 0:
            how = f"was ended by signal {-code} ({signal.Signals(-code).name})"
        return f"the process {how}. It printed last:\n{''.join(self.last_lines)}"

    def end(self) -> None:
        """End the process and everything that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing of it is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdin.close()
        self._reader.join(timeout=1)
        self._process.stdout.close()


# --- waiting, and what went wrong -----------------------------------------------------------------


def _wait(processes: list[RankProcess], *, timeout: float) -> None:
    """Return when all ranks have ended, or soon after the first that failed."""
    end = time.monotonic() + timeout
    failed_at = None
    while any(process.exit_code is None for process in processes):
        now = time.monotonic()
        if failed_at is None and any(process.exit_code for process in processes):
            failed_at = now
        if failed_at is not None and now > failed_at + GRACE_SECONDS:
            return
        if now > end:
            running = [process.rank for process in processes if process.exit_code is None]
            raise TimeoutError(
                f"ranks {running} of {len(processes)} still ran after {timeout:g} s, and were "
                f"ended: give a longer `timeout`, or see whether they wait for each other"
            )
        time.sleep(POLL_SECONDS)


def _raise_errors(processes: list[RankProcess]) -> None:
    failed = [process for process in processes if process.exit_code]
    if not failed:
        return
    errors = [process.error() for process in processes]
    # A mistake in the arguments is found by every rank alike: say it once.
    if None not in errors and len({error[:2] for error in errors}) == 1:
        kind, text, _ = errors[0]
        if kind == "ValueError":
            raise ValueError(text)
    reports = [f"--- rank {process.rank}:\n{process.report().rstrip()}" for process in failed]
    raise RankError(f"{len(failed)} of {len(processes)} ranks failed\n" + "\n".join(reports))


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


def _environment(threads: int) -> dict[str, str]:
    """The variables of a rank: those of this process, and the loopback address for all traffic."""
    own = dict(os.environ, OMP_NUM_THREADS=str(threads), PYTHONUNBUFFERED="1")
    # Left over from a `torchrun` around this process, they would name another group of ranks.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        own.pop(name, None)
    names = [name for _, name in socket.if_nameindex() if name in LOOPBACK_NAMES]
    if names:
        own["GLOO_SOCKET_IFNAME"] = names[0]
        own["NCCL_SOCKET_IFNAME"] = names[0]
    # The package is found wherever this process has found it.
    package = str(Path(__file__).resolve().parents[2])
    own["PYTHONPATH"] = os.pathsep.join(filter(None, [package, own.get("PYTHONPATH")]))
    return own
