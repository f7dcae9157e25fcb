"""What is free, what is given back, and what stays in the process."""

import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch

from recipes_lib.core.measure import free_memory
from recipes_lib.core.measure.free_memory import (
    free_host_bytes,
    free_memory_bytes,
    release_memory,
)
from recipes_lib.core.measure.machine import machine

VERSION_2 = {
    "memory.max": "3000",
    "memory.current": "2500",
    "memory.stat": "inactive_file 100",
}
VERSION_1 = {
    "memory/memory.limit_in_bytes": "3000",
    "memory/memory.usage_in_bytes": "2500",
    "memory/memory.stat": "cache 7\ntotal_inactive_file 100",
}
NO_LIMIT = VERSION_2 | {"memory.max": "max"}


@pytest.mark.parametrize("files", [VERSION_2, VERSION_1, NO_LIMIT])
def test_a_containers_limit_counts(monkeypatch, tmp_path, files):
    """The mistake: what the host has free. The container is killed before it has used that."""
    (tmp_path / "memory").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(free_memory, "CGROUP", tmp_path)
    if files in (VERSION_1, VERSION_2):
        assert free_host_bytes() == 3000 - 2500 + 100
    else:
        assert 2**20 < free_host_bytes() < machine().memory_bytes


class Cycle:
    def __init__(self):
        self.me = self


def test_between_two_models_memory_goes_back(monkeypatch):
    """The mistake: the next model is built in gaps of the last one, beside its reference cycle."""
    given_back = []
    monkeypatch.setattr(free_memory, "machine", lambda: SimpleNamespace(device="cuda"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append("device"))

    def give_back_on_host():  # PyTorch for CPUs does not have it
        given_back.append("host")

    monkeypatch.setattr(torch._C, "_host_emptyCache", give_back_on_host, raising=False)
    dead = weakref.ref(Cycle())
    release_memory()
    assert dead() is None
    assert given_back == ["device", "host"]


# In a process of its own: the setting cannot be taken back.
SCRIPT = """
import resource
import torch
from recipes_lib.core.measure.free_memory import freed_and_kept_bytes, keep_freed_memory

assert keep_freed_memory()
for _ in range(40):  # the heap grows by a few holes first
    pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2_500_000)  # 10 MB, touched once and freed
    new_pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - pages
tensors = [torch.ones(2_500_000) for _ in range(20)]
kept = freed_and_kept_bytes()
del tensors[:10]  # below what is still there, so that nothing goes back by itself
print(new_pages, freed_and_kept_bytes() - kept)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc keeps what is freed, and says so")
def test_freed_memory_is_kept_and_is_free():
    """The mistakes: the setting does nothing; a ladder sees no room, and builds models anew."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    new_pages, kept = map(int, done.stdout.split())
    assert new_pages < 100, "10 MB are 2,400 pages"
    assert kept == pytest.approx(100_000_000, rel=0.01)


@pytest.mark.gpu
def test_memory_of_freed_tensors_is_free_on_gpu():
    """PyTorch keeps it. The mistake: a ladder sees no room for models, and builds them anew."""
    before = free_memory_bytes()
    tensor = torch.zeros(2**28, dtype=torch.uint8, device="cuda")
    assert before - free_memory_bytes() >= 2**28
    del tensor
    assert free_memory_bytes() == pytest.approx(before, abs=2**22)
