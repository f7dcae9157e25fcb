"""Freed memory stays in the process: the next tensor of the same size needs no new pages."""

import subprocess
import sys

import pytest

# In a process of its own: the setting cannot be taken back.
SCRIPT = """
import resource
import torch
from recipes_lib.core.measure.freed_memory import keep_freed_memory

assert keep_freed_memory()
for _ in range(40):  # the heap grows by a few holes first
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2_500_000)  # 10 MB, touched once and freed
    after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(after - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the setting is one of Linux' C library")
def test_a_tensor_of_a_known_size_needs_no_new_pages():
    """The mistake: the setting is accepted and does nothing."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100, "10 MB are 2,400 pages"


def test_other_systems_are_left_alone(monkeypatch):
    from recipes_lib.core.measure import freed_memory

    monkeypatch.setattr(freed_memory.sys, "platform", "darwin")
    assert freed_memory.keep_freed_memory() is False
