"""One rank of a pool, seen from the process that has started it.

The rank runs `core.launch_rank`. Between the two are a folder and two pipes:

    folder    the setup, the tasks, and an answer of each rank to each task
    input     the numbers of the tasks. Its end tells the rank that its parent is gone.
    output    what the rank prints
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

LOOPBACK_NAMES = ("lo", "lo0")  # Linux, macOS
LINES_KEPT = 40  # of what a rank printed, for the report of one that was killed
STACK_SECONDS = 2.0  # for a rank to write down where it is
END_OF_CALL = "\0end of the call\n"  # a rank prints it last; nobody sees it
JOINED = 0  # the number of the answer that a rank gives when it has found the others


@dataclass
class Answer:
    """What a rank writes down after a task: an error, or the result.

    An error is (type, text, traceback). The result is pickled by itself, and only rank 0 gives one.
    """

    error: tuple[str, str, str] | None = None
    result: bytes | None = None


class RankProcess:
    """One rank: its process, what it prints, and its answers.

    Args:
        folder: of the pool, for the setup, tasks and answers.
        rank: its number.
        threads: of OpenMP in the rank.
        device: "cpu" or "cuda". A rank on a CPU sees no GPU, so nothing chooses one by itself.
    """

    def __init__(self, folder: Path, rank: int, *, threads: int, device: str) -> None:
        self.rank = rank
        self.folder = folder
        self.last_lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._unshown: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._all_read = threading.Event()
        self._answer = Answer()
        self._answered: int | None = None  # the number of the task that it belongs to
        self._process = subprocess.Popen(
            [sys.executable, "-m", "recipes_lib.core.ranks.launch_rank", str(folder), str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=_environment(threads, device),
            # A session of its own, which is ended as a whole, with workers that a rank has started.
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, number: int) -> None:
        """Tell the rank to take the task with this number."""
        self._all_read.clear()
        with contextlib.suppress(BrokenPipeError):  # it is gone, and waiting for it will say so
            self._process.stdin.write(f"{number}\n")
            self._process.stdin.flush()

    # --- what it prints ---------------------------------------------------------------------------

    def _read(self) -> None:
        """In a thread: collect what the rank prints."""
        for line in self._process.stdout:
            text, end, _ = line.partition(END_OF_CALL)
            if text:
                self.last_lines.append(text)
                self._unshown.put(text)
            if end:
                self._all_read.set()

    def show(self) -> None:
        """Print here what the rank has printed.

        The caller does it, not the reading thread: in a notebook, what a thread prints may appear
        under the cell in which the thread was started.
        """
        mark = ""
        if self.rank > 0:
            mark = f"[rank {self.rank}] "
        while not self._unshown.empty():
            print(f"{mark}{self._unshown.get()}", end="", flush=True)

    def show_rest(self) -> None:
        """After an answer: wait for what was printed before it, and show that, too."""
        if self.exit_code is None:
            self._all_read.wait(timeout=1)
        else:
            self._reader.join(timeout=1)
        self.show()

    # --- what it answers --------------------------------------------------------------------------

    @property
    def exit_code(self) -> int | None:
        """None while the process runs, minus the number of a signal, or what it ended with."""
        return self._process.poll()

    def answer(self, number: int) -> Answer | None:
        """To the task with this number; None as long as there is none."""
        if self._answered != number:
            file = self.folder / f"answer-{number}-{self.rank}"
            if not file.exists():
                return None
            self._answer = pickle.loads(file.read_bytes())
            self._answered = number
            file.unlink()
        return self._answer

    def failed(self, number: int) -> bool:
        """Whether the task with this number ended in an error, or the process has ended."""
        answer = self.answer(number)
        reported = answer is not None and answer.error is not None
        return reported or self.exit_code is not None

    def report(self, number: int) -> str:
        """The traceback, or how the process ended and what it printed last."""
        answer = self.answer(number)
        if answer is not None and answer.error is not None:
            _, _, trace = answer.error
            return trace
        code = self.exit_code
        how = f"ended with code {code} and reported nothing"
        if code is not None and code < 0:
            how = f"was ended by signal {-code} ({signal.Signals(-code).name})"
        return f"the process {how}. It printed last:\n{''.join(self.last_lines)}"

    def stack(self) -> str:
        """The functions in which the rank is now, the innermost first."""
        file = self.folder / f"stack-{self.rank}"
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)
        end = time.monotonic() + STACK_SECONDS
        while time.monotonic() < end:
            if file.exists() and file.stat().st_size > 0:
                time.sleep(0.05)  # the last lines may still be on their way
                return file.read_text().rstrip()
            time.sleep(0.02)
        return "(unknown: it did not answer)"

    def end(self) -> None:
        """End the process and everything that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing of it is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._reader.join(timeout=1)
        self._process.stdout.close()


def _environment(threads: int, device: str) -> dict[str, str]:
    """The variables of a rank: those of this process, and the loopback address for all traffic."""
    own = dict(os.environ, OMP_NUM_THREADS=str(threads), PYTHONUNBUFFERED="1")
    if device == "cpu":
        own["CUDA_VISIBLE_DEVICES"] = ""
    # Left over from a `torchrun` around this process, they would name another group of ranks.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        own.pop(name, None)
    names = [name for _, name in socket.if_nameindex() if name in LOOPBACK_NAMES]
    if names:
        own["GLOO_SOCKET_IFNAME"] = names[0]
        own["NCCL_SOCKET_IFNAME"] = names[0]
    # The package is found wherever this process has found it.
    package = str(Path(__file__).resolve().parents[3])
    own["PYTHONPATH"] = os.pathsep.join(filter(None, [package, own.get("PYTHONPATH")]))
    return own
