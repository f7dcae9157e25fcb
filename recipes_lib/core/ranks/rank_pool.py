"""Ranks that stay alive: several functions on the same processes, one after the other.

    with RankPool(ranks=4) as pool:
        loss = pool.run(train, steps=10)        # what train(steps=10) returns on rank 0
        size = pool.run(bytes_per_rank)         # the same four processes

All ranks call the same function, and find out by `torch.distributed.get_rank()` who they are:

    this process  --a function-->  rank 0   rank 1   rank 2   rank 3
                  <--an answer-->     \\________|_______|_______/
                                   collectives: gloo on CPUs, NCCL on GPUs

Each rank is the one worker of a `ProcessPoolExecutor` of Python. To import PyTorch takes a process
seconds. On CPUs Python's *fork server* does it once, and each rank is a copy of it. CUDA does not
survive a copy, so a rank with a GPU is a new process.

    one rank fails              the others would wait in a collective for minutes. Here they are
                                ended within seconds, and the error holds every traceback
    ranks wait for each other   `timeout` ends them, and each writes down where it was
    this process ends           a rank notices, and ends with all that it has started
    a machine in a network      ranks meet through a file, and listen on the loopback address only

After an error the next call starts new ranks. One error leaves them alive: a ValueError that all
ranks raise alike. It comes from wrong arguments, before anything has happened.

Source: Python, "concurrent.futures" and "multiprocessing" (contexts and start methods); PyTorch,
"Distributed communication package" (file initialization, GLOO_SOCKET_IFNAME).
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
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from recipes_lib.core.measure.machine import machine

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
# What the fork server imports, once for all pools of this process. The first one silences loggers.
IMPORTED = ["recipes_lib.core.measure.machine", "torch.distributed.tensor"]
IMPORTED += ["torch.distributed.fsdp", "torch.distributed.checkpoint"]
IMPORTED += ["transformers.models.llama.modeling_llama"]
START_SECONDS = 300.0  # for the imports, on a machine that is busy
GRACE_SECONDS = 2.0  # for the other ranks to report an error of their own
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

    Raises ValueError for more ranks than GPUs.
    """

    def __init__(self, *, ranks: int = 2, device: str | None = None) -> None:
        """A pool without processes yet; ValueError for more ranks than GPUs."""
        device = machine().device if device is None else device
        if device == "cuda" and ranks > torch.cuda.device_count():
            raise ValueError(
                f"ranks={ranks}: this machine has {torch.cuda.device_count()} GPU(s), and NCCL "
                f"wants one for each rank; give fewer ranks, or device='cpu'"
            )
        self.ranks = ranks
        self.device = device
        self._workers: dict[int, ProcessPoolExecutor] = {}  # by the number of their process
        self._folder: tempfile.TemporaryDirectory | None = None  # where ranks find each other
        # A pool that is dropped without `close` ends its ranks.
        weakref.finalize(self, _end_processes, self._workers)

    def run(
        self, function: Callable[..., Any], /, *, timeout: float = 60.0, **arguments: Any
    ) -> Any:
        """Call `function(**arguments)` on all ranks, and return what rank 0 returns.

        Each call starts with the same random seed. Ranks import a module once: after a change of
        its text, `close()` lets the next call see the new one.

        Args:
            function: of a module that can be imported. One that is written in a notebook cannot be.
            timeout: seconds for this call. The start of the ranks does not count.
            arguments: anything that can be pickled; the function gets copies.

        Raises RankError with all tracebacks if a rank fails, ValueError if all ranks raise the same
        one, TimeoutError after `timeout` seconds, and ValueError for a function of a notebook.
        """
        if function.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
            raise ValueError(
                f"{function.__name__} is written in a notebook, where a new process cannot find "
                f"it: move it to the top of a module and import it"
            )
        call = pickle.dumps((function, arguments))
        try:
            if not self._workers:
                self._start_processes()
            calls = [(list(sys.path), call, timeout, self._stack(n)) for n in range(self.ranks)]
            return self._ask_ranks(_call_on_rank, calls, timeout)
        except ValueError:
            raise  # of all ranks alike: they wait for the next call
        except BaseException:  # of a keyboard, too: nobody would ever read the answers
            self.close()
            raise

    def close(self) -> None:
        """End the ranks and all that they have started. The next call starts new ones."""
        _end_processes(self._workers)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _start_processes(self) -> None:
        """Start the processes, and wait until they have found each other."""
        method = "spawn"
        if self.device == "cpu" and "forkserver" in multiprocessing.get_all_start_methods():
            method = "forkserver"
            multiprocessing.set_forkserver_preload(IMPORTED)
        context = multiprocessing.get_context(method)
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        workers = [ProcessPoolExecutor(1, context) for _ in range(self.ranks)]
        processes = [worker.submit(_lead_a_group) for worker in workers]
        for worker, process in zip(workers, processes, strict=True):
            self._workers[process.result(START_SECONDS)] = worker
        meeting = f"file://{self._folder.name}/meeting"
        for rank in range(self.ranks):
            Path(self._stack(rank)).touch()
        group = (self.ranks, self.device, meeting)
        self._ask_ranks(
            _join_process_group, [(rank, *group) for rank in range(self.ranks)], START_SECONDS
        )

    def _stack(self, rank: int) -> str:
        """The file in which a rank writes down where it is when the time is over."""
        return f"{self._folder.name}/rank-{rank}"

    def _ask_ranks(self, function: Callable[..., Any], calls: list[tuple], timeout: float) -> Any:
        """What rank 0 of the pool answers, when all have. Raises what went wrong."""
        pairs = zip(self._workers.values(), calls, strict=True)
        answers = [worker.submit(function, *given) for worker, given in pairs]
        wait(answers, timeout, FIRST_EXCEPTION)
        late = [rank for rank, answer in enumerate(answers) if not answer.done()]
        if late:  # soon nobody waits for them, or they write down where they are
            wait(answers, GRACE_SECONDS)
        errors = {n: each.exception() for n, each in enumerate(answers) if each.done()}
        failed = {rank: error for rank, error in errors.items() if error is not None}
        if failed:
            self._raise_failure(failed)
        if late:
            places = [f"--- rank {n} was at:\n{Path(self._stack(n)).read_text()}" for n in late]
            raise TimeoutError(
                f"ranks {late} of {self.ranks} still ran after {timeout:g} s, and were ended: give "
                f"a longer `timeout`, or see below whether they wait for each other\n"
                + "\n".join(places)
            )
        return answers[0].result()

    def _raise_failure(self, failed: dict[int, BaseException]) -> None:
        """A mistake in the arguments is found by every rank alike: say it once."""
        reports = [f"--- rank {rank}:\n{error}" for rank, error in failed.items()]
        of_all = RankError("\n".join([f"{len(failed)} of {self.ranks} ranks failed", *reports]))
        refusals = {getattr(error, "refusal", None) for error in failed.values()}
        if len(failed) == self.ranks and len(refusals) == 1 and None not in refusals:
            raise ValueError(refusals.pop()) from of_all
        raise of_all


def _end_processes(workers: dict[int, ProcessPoolExecutor]) -> None:
    """End all processes of a pool with what they have started, and forget them."""
    while workers:
        process, worker = workers.popitem()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing of it is left
            os.killpg(process, signal.SIGKILL)
        worker.shutdown(cancel_futures=True)


# --- one rank, seen from itself -------------------------------------------------------------------


class _Failure(Exception):
    """The traceback of an error as text, which can always be sent, and what a ValueError says."""

    def __init__(self, trace: str, refusal: str | None) -> None:
        super().__init__(trace, refusal)
        self.trace = trace
        self.refusal = refusal

    def __str__(self) -> str:
        return self.trace


def _lead_a_group() -> int:
    """In a process of the pool: its number, by which it is ended with all that it has started."""
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    return os.getpid()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os.killpg(0, signal.SIGKILL)


def _join_process_group(rank: int, ranks: int, device: str, meeting: str) -> None:
    """In a process of the pool: join the others, on this rank's device and the loopback address."""
    for name in OF_TORCHRUN:
        os.environ.pop(name, None)
    for _, name in socket.if_nameindex():
        if name in LOOPBACK_NAMES:
            os.environ |= {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    torch.set_num_threads(1)
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


def _call_on_rank(path: list[str], call: bytes, timeout: float, stack: str) -> Any:
    """In a process of the pool: what the function returns, if this is rank 0."""
    sys.path[:] = path
    torch.manual_seed(0)
    gc.collect()  # models of the last call refer to themselves, and this one may count bytes
    gc.freeze()  # what the imports have made stays: spare the collector the walk through it
    with open(stack, "w") as file:
        faulthandler.dump_traceback_later(timeout, file=file)
        try:
            function, arguments = pickle.loads(call)
            result = function(**arguments)
        except Exception as error:
            refusal = str(error) if type(error) is ValueError else None
            raise _Failure(traceback.format_exc(), refusal) from None
        finally:
            faulthandler.cancel_dump_traceback_later()
            sys.stdout.flush()
    return result if distributed.get_rank() == 0 else None
