"""Ranks for the tests, each a copy of one process that has imported already.

    with copied_ranks(ranks=4) as pool:
        pool.run(function, **arguments)         # as with `core.rank_pool.RankPool`, which it is

To import PyTorch and transformers takes a process seconds, and the tests have two pools on each of
their workers. One process imports, the *template*. It starts nothing and computes nothing, so that
it can be copied (`fork`) at any time:

    tests  --start rank 3-->  template  --fork-->  rank 3
           <------------- tasks and answers ------>

That a rank of the package finds all that it needs by itself is for `core/test_rank_pool.py` and
`core/test_launch.py`. On other systems than Linux the pool is the ordinary one.
"""

import atexit
import functools
import gc
import importlib
import os
import pickle
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from recipes_lib.core.ranks import launch_rank, rank_process
from recipes_lib.core.ranks.rank_pool import RankPool

ROOT = Path(__file__).resolve().parents[1]
IMPORTED = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint")
IMPORTED += ("transformers.models.llama.modeling_llama", "pytest")
MESSAGE = 1 << 16  # bytes: the environment of a rank is the longest
POLL_SECONDS = 0.01


def copied_ranks(*, ranks, device="cpu", threads=1):
    """A pool whose ranks are copies, where they can be: on CPUs, and on Linux."""
    kind = RankPool
    if device == "cpu" and sys.platform == "linux":
        kind = CopiedRanks
    return kind(ranks=ranks, device=device, threads=threads)


class CopiedRanks(RankPool):
    """A pool whose ranks the template starts."""

    def _start(self):
        # What starts a process is another; everything else is the pool of the package.
        other = SimpleNamespace(Popen=Copy, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT)
        with mock.patch.object(rank_process, "subprocess", other):
            super()._start()


# --- in the tests ---------------------------------------------------------------------------------


class Copy:
    """In place of `Popen`: a process that is a child of the template, and not of this one."""

    def __init__(self, command, *, env, **options):
        _, option, module, folder, rank = command
        assert (option, module) == ("-m", "recipes_lib.core.ranks.launch_rank")
        assert options["start_new_session"]
        own_input, self.stdin = pipe(reading=False)
        output, self.stdout = pipe(reading=True)
        start = {"words": [folder, rank], "environment": env}
        self.pid = ask_template(start, descriptors=[own_input, output])
        os.close(own_input)
        os.close(output)
        self.returncode = None

    def poll(self):
        """As of `Popen`: None, the code, or minus the number of a signal."""
        if self.returncode is None:
            self.returncode = ask_template({"ended": self.pid})
        return self.returncode

    def wait(self):
        while self.poll() is None:
            time.sleep(POLL_SECONDS)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)


def pipe(*, reading):
    """The descriptor for the rank, and the file that is left here: to read from or to write to."""
    read, write = os.pipe()
    if reading:
        return write, os.fdopen(read, "r", errors="replace")
    return read, os.fdopen(write, "w")


@functools.cache
def template():
    """The connection to the template, which is started when it is asked for the first time."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.copied_ranks", str(theirs.fileno())]
    own = dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    process = subprocess.Popen(
        command, cwd=ROOT, env=own, pass_fds=[theirs.fileno()], start_new_session=True
    )
    theirs.close()
    atexit.register(process.wait)
    atexit.register(ours.close)  # its end; runs before the other
    return ours


def ask_template(question, *, descriptors=()):
    """What the template answers."""
    connection = template()
    socket.send_fds(connection, [pickle.dumps(question)], descriptors)
    return pickle.loads(connection.recv(MESSAGE))


# --- in the template ------------------------------------------------------------------------------


def main():
    """Import, and then copy this process, or say whether a copy has ended, until the tests end."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # a collection would write to the pages that copies share
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, MESSAGE, maxfds=2)
        if not message:
            return
        question = pickle.loads(message)
        if "ended" in question:
            answer = exit_code(question["ended"])
        else:
            answer = os.fork()
            if answer == 0:
                connection.close()
                be_a_rank(*descriptors, **question)
            while os.getpgid(answer) != answer:  # who ends a rank ends its group
                time.sleep(POLL_SECONDS / 10)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(pickle.dumps(answer))


def exit_code(child):
    """As `Popen.poll` says it."""
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended == 0:
        return None
    return os.waitstatus_to_exitcode(status)


def be_a_rank(own_input, output, *, words, environment):
    """In the copy: what a new process has, and then what it does."""
    try:
        os.setsid()
        for descriptor, number in ((own_input, 0), (output, 1), (output, 2)):
            os.dup2(descriptor, number)
        os.close(own_input)
        os.close(output)
        # By lines: what was printed before the process is killed has to arrive.
        sys.stdin = os.fdopen(0)
        sys.stdout = os.fdopen(1, "w", buffering=1)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["launch_rank", *words]
        launch_rank.main()
    except BaseException:
        traceback.print_exc()
    os._exit(1)  # a rank ends by a signal only


if __name__ == "__main__":
    main()
