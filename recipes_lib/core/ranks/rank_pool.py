"""Ranks that stay alive: several functions on the same processes, one after the other.

    with RankPool(ranks=4) as pool:
        loss = pool.run(train, steps=10)        # what train(steps=10) returns on rank 0
        size = pool.run(bytes_per_rank)         # the same four processes

All ranks call the same function, and find out by `torch.distributed.get_rank()` who they are:

    this process  --a function-->  rank 0   rank 1   rank 2   rank 3
                  <--an answer-->     \\________|_______|_______/
                                   collectives: gloo on CPUs, NCCL on GPUs

To import PyTorch takes a process seconds. On CPUs Python's *fork server* does it once, and each
rank is a copy of it. CUDA does not survive a copy, so a rank with a GPU is a new process.

    one rank fails              the others would wait in a collective for minutes. Here they are
                                ended within seconds, and the error holds every traceback
    ranks wait for each other   `timeout` ends them, and each writes down where it was
    this process ends           a rank notices, and ends with all that it has started
    a machine in a network      ranks meet through a file, and listen on the loopback address only

After an error the next call starts new ranks. One error leaves them alive: a ValueError that all
ranks raise alike. It comes from wrong arguments, before anything has happened.

Source: Python, "multiprocessing" (contexts and start methods); PyTorch, "Distributed communication
package" (file initialization, GLOO_SOCKET_IFNAME).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

import torch
from torch import distributed

from recipes_lib.core.checks import check_choice, check_number, check_whole
from recipes_lib.core.measure.machine import machine

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
# What the fork server imports, once for all pools of this process. The first one silences loggers.
IMPORTED = ["recipes_lib.core.measure.machine", "torch.distributed.tensor"]
IMPORTED += ["torch.distributed.fsdp", "torch.distributed.checkpoint"]
IMPORTED += ["transformers.models.llama.modeling_llama"]
START_SECONDS = 300.0  # for the imports, on a machine that is busy
GRACE_SECONDS = 2.0  # for the other ranks to report an error of their own
STACK_SECONDS = 0.5  # for a rank to write down where it is
LOOPBACK_NAMES = ("lo", "lo0")  # Linux, macOS
# Left over from a `torchrun` around the pool, they would name another group of ranks.
OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


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
        device = machine().device if device is None else device
        check_choice(BACKENDS, device=device)
        if device == "cuda" and ranks > torch.cuda.device_count():
            raise ValueError(
                f"ranks={ranks}: this machine has {torch.cuda.device_count()} GPU(s), and NCCL "
                f"wants one for each rank; give fewer ranks, or device='cpu'"
            )
        self.ranks = ranks
        self.device = device
        self.threads = threads
        self._ranks: list[_Rank] = []
        self._folder: tempfile.TemporaryDirectory | None = None  # where ranks find each other
        # A pool that is dropped without `close` ends its ranks, and so does the end of Python.
        Finalize(self, _end, [self._ranks], exitpriority=10)

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
        one, TimeoutError after `timeout` seconds, and ValueError for a function of a notebook.
        """
        check_number(above=0, timeout=timeout)
        if function.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
            raise ValueError(
                f"{function.__name__} is written in a notebook, where a new process cannot find "
                f"it: move it to the top of a module and import it"
            )
        call = pickle.dumps((function, arguments))
        try:
            if not self._ranks or any(rank.has_ended() for rank in self._ranks):
                self._start()
            for rank in self._ranks:
                rank.send((list(sys.path), call))
            return self._result(timeout)
        except ValueError:
            raise  # of all ranks alike: they wait for the next call
        except BaseException:  # of a keyboard, too: nobody would ever read the answers
            self.close()
            raise

    def close(self) -> None:
        """End the ranks and all that they have started. The next call starts new ones."""
        _end(self._ranks)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _start(self) -> None:
        """Start the processes, and wait until they have found each other."""
        self.close()
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        meeting = f"file://{self._folder.name}/meeting"
        for number in range(self.ranks):
            self._ranks.append(_Rank(number, self.ranks, self.device, self.threads, meeting))
        self._result(START_SECONDS)

    def _result(self, timeout: float) -> Any:
        """What rank 0 answers, when all have. Raises what went wrong."""
        end = time.monotonic() + timeout
        while waiting := [rank for rank in self._ranks if rank.is_busy()]:
            if time.monotonic() > end:
                break
            wait([source for rank in waiting for source in rank.sources()], end - time.monotonic())
            for rank in waiting:
                rank.receive()
            if any(rank.failed() for rank in waiting):  # soon nobody will wait for the others
                end = min(end, time.monotonic() + GRACE_SECONDS)
        failed = [rank for rank in self._ranks if rank.failed()]
        if not failed and waiting:
            raise TimeoutError(self._who_still_runs(waiting, timeout))
        for rank in self._ranks:
            rank.show(last=True)
        if not failed:
            return pickle.loads(self._ranks[0].answer.result)
        self._raise_value_error_of_all()
        reports = [f"--- rank {rank.number}:\n{rank.report()}" for rank in failed]
        raise RankError("\n".join([f"{len(failed)} of {self.ranks} ranks failed", *reports]))

    def _raise_value_error_of_all(self) -> None:
        """A mistake in the arguments is found by every rank alike: say it once, and go on."""
        first = self._ranks[0].answer
        if first is None or first.kind != "ValueError":
            return
        if all(rank.answer is not None and rank.answer[:3] == first[:3] for rank in self._ranks):
            raise ValueError(first.text) from RankError(f"--- rank 0:\n{first.trace}")

    def _who_still_runs(self, waiting: list[_Rank], timeout: float) -> str:
        places = [f"--- rank {rank.number} was at:\n{rank.where_it_is()}" for rank in waiting]
        message = (
            f"ranks {[rank.number for rank in waiting]} of {self.ranks} still ran after "
            f"{timeout:g} s, and were ended: give a longer `timeout`, or see below whether they "
            f"wait for each other"
        )
        return "\n".join([message, *places])


# --- one rank, seen from here ---------------------------------------------------------------------


class Answer(NamedTuple):
    """What a rank sends after a call: the pickled result of rank 0, or what kind of error."""

    result: bytes = b""
    kind: str = ""
    text: str = ""
    trace: str = ""


class _Rank:
    """A process, a connection for calls and answers, and a pipe for all that it prints."""

    def __init__(self, number: int, ranks: int, device: str, threads: int, meeting: str) -> None:
        self.number = number
        self.answer: Answer | None = None  # to the last call
        self._line = ""  # that is not complete yet
        method = "spawn"
        if device == "cpu" and "forkserver" in multiprocessing.get_all_start_methods():
            method = "forkserver"
            multiprocessing.set_forkserver_preload(IMPORTED)
        context = multiprocessing.get_context(method)
        self._calls, calls = context.Pipe()
        self._printed, printed = context.Pipe(duplex=False)
        os.set_blocking(self._printed.fileno(), False)
        group = (number, ranks, device, threads, meeting)
        self.process = context.Process(target=_be_a_rank, args=(calls, printed, *group))
        self.process.start()
        calls.close()
        printed.close()

    def send(self, call: tuple[list[str], bytes]) -> None:
        self.answer = None
        with contextlib.suppress(BrokenPipeError):  # it is gone, and waiting for it will say so
            self._calls.send_bytes(pickle.dumps(call))

    def has_ended(self) -> bool:
        return self.process.exitcode is not None

    def is_busy(self) -> bool:
        return self.answer is None and not self.has_ended()

    def failed(self) -> bool:
        return self.has_ended() or (self.answer is not None and self.answer.kind != "")

    def sources(self) -> list[Any]:
        """What to wait for: something printed, an answer, the end of the process."""
        return [self._printed, self._calls, self.process.sentinel]

    def receive(self) -> None:
        """Show what it has printed, and take its answer if there is one."""
        self.show()
        with contextlib.suppress(EOFError, ConnectionError):  # it has ended
            if self._calls.poll():
                self.answer = pickle.loads(self._calls.recv_bytes())

    def show(self, *, last: bool = False) -> None:
        """Print here what it has printed: whole lines, and after its last one also a part."""
        *lines, self._line = (self._line + self._read()).split("\n")
        lines = [f"{line}\n" for line in lines]
        if last:
            lines.append(self._line)
            self._line = ""
        for line in filter(None, lines):
            mark = f"[rank {self.number}] " if self.number > 0 else ""
            print(f"{mark}{line}", end="", flush=True)

    def _read(self) -> str:
        parts = []
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._printed.fileno(), 1 << 16):
                parts.append(part)
        return b"".join(parts).decode(errors="replace")

    def where_it_is(self) -> str:
        """The functions in which the rank is now, the innermost first."""
        self.show()
        os.kill(self.process.pid, signal.SIGUSR1)  # see `_be_a_rank`
        time.sleep(STACK_SECONDS)
        return self._read().rstrip()

    def report(self) -> str:
        """The traceback, or how the process has ended."""
        if self.answer is not None:
            return self.answer.trace.rstrip()
        code = self.process.exitcode
        if code < 0:
            return f"the process was ended by signal {-code} ({signal.Signals(-code).name})"
        return f"the process ended with code {code} and reported nothing"

    def end(self) -> None:
        """End the process and everything that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing of it is left
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # one that has no group of its own yet
        self.process.join()
        self._calls.close()
        self._printed.close()


def _end(ranks: list[_Rank]) -> None:
    """End all, and forget them."""
    while ranks:
        ranks.pop().end()


# --- one rank, seen from itself -------------------------------------------------------------------


def _be_a_rank(calls: Connection, printed: Connection, rank: int, *group: Any) -> None:
    """Join the others, and then answer one call after the other, until the parent ends."""
    os.setsid()  # a group of its own, which is ended as a whole, with workers that it has started
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        os.dup2(printed.fileno(), number)
        stream.reconfigure(line_buffering=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # On this signal the rank writes down in which functions it is, whatever it is doing.
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=False)
    _reply(calls, rank, _join, rank, *group)
    while True:
        path, call = pickle.loads(calls.recv_bytes())
        sys.path[:] = path
        _reply(calls, rank, _call, call)


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os.killpg(0, signal.SIGKILL)


def _reply(calls: Connection, rank: int, action: Callable[..., Any], *given: Any) -> None:
    """Act, and send the result, if this is rank 0, or the error."""
    try:
        result = action(*given)
        answer = Answer(pickle.dumps(result if rank == 0 else None))
        del result
        gc.collect()  # models refer to themselves, and the next call may count bytes
    except BaseException as error:
        answer = Answer(b"", type(error).__name__, str(error), traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    calls.send_bytes(pickle.dumps(answer))


def _join(rank: int, ranks: int, device: str, threads: int, meeting: str) -> None:
    """Join the process group, on the device of this rank and on the loopback address."""
    for name in OF_TORCHRUN:
        os.environ.pop(name, None)
    for _, name in socket.if_nameindex():
        if name in LOOPBACK_NAMES:
            os.environ |= {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    torch.set_num_threads(threads)
    of_rank = None
    if device == "cuda":
        of_rank = torch.device("cuda", rank)
        torch.cuda.set_device(of_rank)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # so that nothing chooses a GPU by itself
    distributed.init_process_group(
        BACKENDS[device],
        init_method=meeting,
        rank=rank,
        world_size=ranks,
        timeout=timedelta(days=7),  # the pool ends ranks that wait too long
        device_id=of_rank,
    )
    distributed.barrier()


def _call(call: bytes) -> Any:
    torch.manual_seed(0)
    function, arguments = pickle.loads(call)
    gc.freeze()  # what the imports have made stays: spare the collector the walk through it
    return function(**arguments)
