"""Ranks that compute together, fail, hang, are killed, start again, and leave nothing behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import distributed

from recipes_lib.core.ranks.rank_pool import RankError, RankPool

ROOT = Path(__file__).resolve().parents[3]


# --- what the ranks do ----------------------------------------------------------------------------


def add_up(start):
    """The sum over all ranks of `start` + rank."""
    number = torch.tensor(float(start + distributed.get_rank()))
    distributed.all_reduce(number)
    return number.item()


def process_numbers():
    """The numbers of the processes of all ranks, and a random number of each."""
    mine = (os.getpid(), torch.rand(()).item())
    all_of_them = [None] * distributed.get_world_size()
    distributed.all_gather_object(all_of_them, mine)
    return all_of_them


def one_fails():
    """Rank 1 raises; the other waits for it."""
    if distributed.get_rank() == 1:
        raise RuntimeError("no more rows")
    distributed.barrier()


def one_is_killed():
    """Rank 1 ends without a word; the other waits for it."""
    if distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    distributed.barrier()


def all_refuse(heads):
    """Every rank finds the same mistake."""
    raise ValueError(f"heads={heads}: give a multiple of {distributed.get_world_size()}")


def wait_forever(note):
    """Rank 1 never comes to the barrier, and starts a process before, as a loader does."""
    if distributed.get_rank() == 1:
        Path(note).write_text(str(subprocess.Popen(["sleep", "600"]).pid))
        time.sleep(600)
    distributed.barrier()


def open_sockets():
    """The addresses at which this process listens."""
    inodes = set()
    for link in Path("/proc/self/fd").iterdir():
        if link.exists() or link.is_symlink():  # the folder's own descriptor is closed by now
            inodes.add(os.readlink(link))
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
            found.add(fields[1].split(":")[0])
    return found


# --- what works -----------------------------------------------------------------------------------


def test_ranks_compute_together_and_stay(two_ranks):
    """The mistakes: every rank alone, new processes for each call."""
    before = two_ranks.run(process_numbers)
    assert two_ranks.run(add_up, start=10) == 10 + 11
    assert len({process for process, _ in before}) == 2
    assert two_ranks.run(process_numbers) == before, "the same ones, and the same random numbers"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_listen_on_the_loopback_address_only(two_ranks):
    assert two_ranks.run(open_sockets) == {"0100007F"}  # 127.0.0.1


# --- what goes wrong ------------------------------------------------------------------------------


def test_a_mistake_that_all_ranks_find_is_a_value_error_and_costs_no_start(two_ranks):
    before = two_ranks.run(process_numbers)
    with pytest.raises(ValueError, match=r"^heads=3: give a multiple of 2$") as refusal:
        two_ranks.run(all_refuse, heads=3)
    assert "in all_refuse" in str(refusal.value.__cause__), "where it was raised"
    assert two_ranks.run(process_numbers) == before


@pytest.fixture(scope="module")
def pool():
    """For what ends the ranks."""
    with RankPool(ranks=2, device="cpu") as pool:
        yield pool


def test_a_rank_that_fails_ends_the_call_with_its_traceback(pool):
    """The mistake: the others wait in a collective until its timeout, half an hour by default."""
    start = time.monotonic()
    with pytest.raises(RankError) as failure:
        pool.run(one_fails, timeout=500)
    assert time.monotonic() - start < 60
    text = str(failure.value)
    assert "--- rank 1:" in text and "RuntimeError: no more rows" in text
    assert "in one_fails" in text, "the traceback, and not the message alone"
    assert pool.run(add_up, start=0) == 1, "the next call has new ranks"


def test_a_rank_that_is_killed_is_named(pool):
    with pytest.raises(RankError, match=r"(?s)rank 1:.*terminated abruptly"):
        pool.run(one_is_killed, timeout=500)


def test_a_call_that_hangs_ends_and_says_where_each_rank_was(pool, tmp_path):
    """What a rank has started ends with it. Workers that stay would hold memory and files."""
    note = tmp_path / "sleeper"
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] of 2 still ran after 4 s") as failure:
        pool.run(wait_forever, timeout=4, note=str(note))
    first, second = str(failure.value).split("--- rank 1 was at:")
    assert "in barrier" in first
    assert "in wait_forever" in second and "in barrier" not in second
    _until_ended([int(note.read_text())])


PARENT = """
import sys
sys.path.insert(0, {root!r})
from recipes_lib.core.ranks.rank_pool import RankPool
from tests.core.ranks import test_rank_pool as ranks

pool = RankPool(ranks=2, device="cpu")
print(*[process for process, _ in pool.run(ranks.process_numbers)], flush=True)
ranks.time.sleep(600)
"""


def test_no_rank_outlives_the_process_that_started_it():
    """A kernel that is restarted kills this process."""
    command = [sys.executable, "-c", PARENT.format(root=str(ROOT))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        ranks = [int(number) for number in parent.stdout.readline().split()]
        parent.kill()
        parent.wait(timeout=60)
    assert len(ranks) == 2
    _until_ended(ranks)


def _until_ended(processes, seconds=60):
    end = time.monotonic() + seconds
    command = ["ps", "-o", "stat=", "-p", ",".join(map(str, processes))]
    while True:
        states = subprocess.run(command, capture_output=True, text=True).stdout.split()
        if all(state.startswith("Z") for state in states):
            return
        assert time.monotonic() < end
        time.sleep(0.1)
