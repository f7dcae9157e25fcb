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
from tests.copied_ranks import copied_ranks

HERE = Path(__file__).parent


# --- what the ranks do ----------------------------------------------------------------------------


def add_up(start):
    """The sum over all ranks of `start` + rank."""
    number = torch.tensor(float(start + distributed.get_rank()))
    distributed.all_reduce(number)
    print(f"rank {distributed.get_rank()} has {number.item():.0f}")
    return number.item()


def process_numbers():
    """The numbers of the processes of all ranks, and a random number of each."""
    mine = (os.getpid(), torch.rand(()).item())
    all_of_them = [None] * distributed.get_world_size()
    distributed.all_gather_object(all_of_them, mine)
    return all_of_them


def one_fails(rank):
    """One rank raises; the others wait for it."""
    if distributed.get_rank() == rank:
        raise RuntimeError("no more rows")
    distributed.barrier()


def one_is_killed(rank):
    """One rank ends without a word; the others wait for it."""
    if distributed.get_rank() == rank:
        print("last words")
        os.kill(os.getpid(), signal.SIGKILL)
    distributed.barrier()


def all_refuse(heads):
    """Every rank finds the same mistake."""
    raise ValueError(f"heads={heads}: give a multiple of {distributed.get_world_size()}")


def give_what_cannot_be_sent():
    """A function inside of a function cannot be pickled."""

    def inside():
        pass

    return inside


def wait_forever(note=None):
    """Rank 1 never comes to the barrier.

    It starts a process before, as the worker of a loader is one, if a file is given for its number.
    """
    if distributed.get_rank() == 1:
        if note is not None:
            Path(note).write_text(str(subprocess.Popen(["sleep", "600"]).pid))
        time.sleep(600)
    distributed.barrier()


def read_the_input():
    """What a function reads must not be the numbers of the next tasks."""
    return sys.stdin.read()


def open_sockets():
    """The addresses at which this process listens."""
    inodes = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(os.readlink(link))
        except OSError:
            continue  # the folder's own descriptor is closed by now
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        listening = fields[3] == "0A"
        if listening and f"socket:[{fields[9]}]" in inodes:
            found.append(fields[1].split(":")[0])
    return found


def living(mark):
    """The command lines of living ranks whose folder holds `mark`."""
    every = ["ps", "-ww", "-eo", "stat,args"]
    listed = subprocess.run(every, capture_output=True, text=True).stdout
    lines = [line for line in listed.splitlines() if "core.launch_rank" in line and mark in line]
    return [line for line in lines if not line.startswith("Z")]


# --- what works -----------------------------------------------------------------------------------


def test_ranks_compute_together_and_stay(two_ranks, capsys):
    """The mistakes: every rank alone, new processes for each call, prints that get lost."""
    before = two_ranks.run(process_numbers)
    assert two_ranks.run(add_up, start=10) == 10 + 11
    printed = capsys.readouterr().out.splitlines()
    assert sorted(printed) == ["[rank 1] rank 1 has 21", "rank 0 has 21"]
    assert len(set(before)) == 2, "two processes"
    assert two_ranks.run(process_numbers) == before, "the same ones, and the same random numbers"


def test_four_ranks(four_ranks):
    assert four_ranks.run(add_up, start=1) == 1 + 2 + 3 + 4


def test_a_function_that_reads_takes_no_tasks_away(two_ranks):
    assert two_ranks.run(read_the_input) == ""
    assert two_ranks.run(add_up, start=0) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_listen_on_the_loopback_address_only(two_ranks):
    addresses = two_ranks.run(open_sockets)
    assert addresses, "gloo listens somewhere"
    assert set(addresses) == {"0100007F"}  # 127.0.0.1


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
    pool.run(add_up, start=0)
    start = time.monotonic()
    with pytest.raises(RankError) as failure:
        pool.run(one_fails, rank=1, timeout=500)
    assert time.monotonic() - start < 60
    text = str(failure.value)
    assert "--- rank 1:" in text and "RuntimeError: no more rows" in text
    assert "in one_fails" in text, "the traceback, and not the message alone"
    assert pool.run(add_up, start=0) == 1, "the next call has new ranks"


def test_a_rank_that_is_killed_is_named_with_its_signal_and_last_words(pool):
    with pytest.raises(RankError, match=r"(?s)rank 1:.*signal 9 \(SIGKILL\).*last words"):
        pool.run(one_is_killed, rank=1, timeout=500)


def test_a_result_that_cannot_be_sent_is_an_error_of_rank_0():
    failed = pytest.raises(RankError, match=r"(?s)1 of 2 ranks failed.*rank 0:.*inside")
    with copied_ranks(ranks=2) as pool, failed:
        pool.run(give_what_cannot_be_sent)


def test_a_call_that_hangs_ends_and_says_where_each_rank_was(pool, tmp_path):
    """What a rank has started ends with it. Workers that stay would hold memory and files."""
    note = tmp_path / "sleeper"
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] of 2 still ran after 2 s") as failure:
        pool.run(wait_forever, timeout=2, note=str(note))
    first, second = str(failure.value).split("--- rank 1 was at:")
    assert "in barrier" in first
    assert "in wait_forever" in second and "in barrier" not in second
    _until(lambda: _gone(int(note.read_text())))
    pool.close()  # twice does no harm


PARENT = """
from recipes_lib.core.ranks.rank_pool import RankPool
from {module} import wait_forever
RankPool(ranks=2, device="cpu").run(wait_forever, timeout=500)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the list of processes")
def test_no_rank_outlives_the_process_that_started_it(tmp_path):
    """A kernel that is restarted kills this process without a chance to clean up."""
    environment = dict(os.environ, TMPDIR=str(tmp_path))
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), *sys.path])
    program = PARENT.format(module=Path(__file__).stem)
    parent = subprocess.Popen([sys.executable, "-c", program], env=environment)
    try:
        _until(lambda: len(living(str(tmp_path))) == 2)
    finally:
        parent.kill()
        parent.wait()
    _until(lambda: not living(str(tmp_path)))


def _until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def _gone(process):
    listed = ["ps", "-o", "stat=", "-p", str(process)]
    state = subprocess.run(listed, capture_output=True, text=True).stdout.strip()
    return state in ("", "Z")


def test_bad_input_is_refused_before_anything_starts():
    with pytest.raises(ValueError, match="ranks=0: give a whole number of 1 or more"):
        RankPool(ranks=0)
    with pytest.raises(ValueError, match="device='tpu': choose one of"):
        RankPool(ranks=2, device="tpu")
    pool = RankPool(ranks=2, device="cpu")
    with pytest.raises(ValueError, match="timeout=0: give a finite number above 0"):
        pool.run(add_up, start=1, timeout=0)

    def inside():
        pass

    with pytest.raises(ValueError, match="inside is written in a notebook"):
        pool.run(inside)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"this machine has 0 GPU\(s\)"):
            RankPool(ranks=2, device="cuda")
