"""Ranks that start, compute together, fail, are killed, and leave nothing behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import distributed

from recipes_lib.core.launch import RankError, launch

HERE = Path(__file__).parent


# --- what the ranks do ----------------------------------------------------------------------------


def add_up(start):
    """The sum over all ranks of `start` + rank."""
    number = torch.tensor(float(start + distributed.get_rank()))
    distributed.all_reduce(number)
    print(f"rank {distributed.get_rank()} has {number.item():.0f}")
    return number.item()


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


def wait_forever():
    """Rank 1 never comes to the barrier."""
    if distributed.get_rank() == 1:
        time.sleep(600)
    distributed.barrier()


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


def processes(mark):
    """The command lines of living ranks whose folder or arguments hold `mark`."""
    every = ["ps", "-ww", "-eo", "stat,args"]
    listed = subprocess.run(every, capture_output=True, text=True).stdout
    lines = [line for line in listed.splitlines() if "core.launch_rank" in line and mark in line]
    return [line for line in lines if not line.startswith("Z")]


# --- tests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_ranks_compute_together(ranks, capsys):
    """The mistake: every rank alone, which a sum over one rank would not show."""
    total = launch(add_up, ranks=ranks, device="cpu", start=10)
    assert total == 10 * ranks + sum(range(ranks))
    printed = capsys.readouterr().out
    assert f"rank 0 has {total:.0f}\n" in printed
    if ranks > 1:
        assert f"[rank 1] rank 1 has {total:.0f}" in printed


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_ends_the_run_with_its_traceback(rank):
    """The mistake: the others wait in a collective until its timeout, half an hour by default."""
    start = time.monotonic()
    with pytest.raises(RankError) as failure:
        launch(one_fails, ranks=2, device="cpu", rank=rank)
    assert time.monotonic() - start < 60
    text = str(failure.value)
    assert f"--- rank {rank}:" in text and "RuntimeError: no more rows" in text
    assert "in one_fails" in text, "the traceback, and not the message alone"


def test_a_rank_that_is_killed_is_named_with_its_signal_and_last_words():
    with pytest.raises(RankError, match=r"(?s)rank 1:.*signal 9 \(SIGKILL\).*last words"):
        launch(one_is_killed, ranks=2, device="cpu", rank=1)


def test_a_mistake_that_all_ranks_find_is_a_value_error():
    with pytest.raises(ValueError, match=r"^heads=3: give a multiple of 2$"):
        launch(all_refuse, ranks=2, device="cpu", heads=3)


def test_a_run_that_hangs_ends_and_says_who_still_ran():
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] of 2 still ran after 8 s"):
        launch(wait_forever, ranks=2, device="cpu", timeout=8)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_listen_on_the_loopback_address_only():
    addresses = launch(open_sockets, ranks=2, device="cpu")
    assert addresses, "gloo listens somewhere"
    assert set(addresses) == {"0100007F"}  # 127.0.0.1


PARENT = """
import sys
sys.path.insert(0, {here!r})
import test_launch
from recipes_lib.core.launch import launch
launch(test_launch.wait_forever, ranks=2, device="cpu", timeout=500)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the list of processes")
def test_no_rank_outlives_the_process_that_started_it(tmp_path):
    """A kernel that is restarted kills this process without a chance to clean up."""
    environment = dict(os.environ, TMPDIR=str(tmp_path))
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(here=str(HERE))], env=environment
    )
    try:
        _until(lambda: len(processes(str(tmp_path))) == 2)
    finally:
        parent.kill()
        parent.wait()
    _until(lambda: not processes(str(tmp_path)))


def _until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_bad_input_is_refused_before_anything_starts():
    with pytest.raises(ValueError, match="ranks=0: give a whole number of 1 or more"):
        launch(add_up, ranks=0, start=1)
    with pytest.raises(ValueError, match="device='tpu': choose one of"):
        launch(add_up, ranks=2, device="tpu", start=1)

    def inside():
        pass

    with pytest.raises(ValueError, match="inside is written in a notebook"):
        launch(inside, ranks=2, device="cpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"this machine has 0 GPU\(s\)"):
            launch(add_up, ranks=2, device="cuda", start=1)
