"""launch/guards.py: a start that would train something else is refused."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType

from tests.core.refusal import refusal
from tests.launch.scripts import load

guards = load("guards")
OF_TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture
def torchrun(monkeypatch):
    for name, value in OF_TORCHRUN.items():
        monkeypatch.setenv(name, value)


def test_a_process_that_is_alone_is_refused(monkeypatch):
    for name in OF_TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="torchrun --standalone"):
        guards.require_torchrun()


def test_another_number_of_ranks_is_refused(torchrun):
    guards.require_torchrun(2)
    with pytest.raises(ValueError, match=r"2 rank\(s\) have started, not --ranks 16"):
        guards.require_torchrun(16)


def test_settings_that_nobody_reads_are_refused(monkeypatch):
    guards.refuse_settings_of_accelerate()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="FSDP"):
        guards.refuse_settings_of_accelerate()


def rows_of_ranks():
    """On a rank: what is said about rows that are the same on all ranks, and others."""
    same = torch.arange(6).view(2, 3)
    other = same + torch.distributed.get_rank()
    found = {}
    for shared in (True, False):
        found["same", shared] = refusal(guards.require_rows_of_ranks, same, shared=shared)
        found["other", shared] = refusal(guards.require_rows_of_ranks, other, shared=shared)
    return found


def test_rows_of_ranks(two_ranks):
    """Ranks that divide a batch read other rows, and ranks that divide a layer the same."""
    found = two_ranks.run(rows_of_ranks)
    assert found["same", True] is found["other", False] is None
    assert "read 1 different" in found["same", False]
    assert "read 2 different" in found["other", True]


def told_about_the_folder(folder, own):
    """On ranks: what each is told about a folder that all share, or about one of its own."""
    folder = Path(folder)
    if own:
        folder = folder / str(torch.distributed.get_rank())
        folder.mkdir()
    return guards.of_all_ranks(refusal(guards.require_shared_folder, folder))


def test_a_folder_that_is_not_shared_is_refused(two_ranks, tmp_path):
    """Each machine has a folder of that name; a checkpoint would lie in parts on all of them."""
    assert two_ranks.run(told_about_the_folder, folder=str(tmp_path), own=False) == [None, None]
    assert list(tmp_path.iterdir()) == []
    for told in two_ranks.run(told_about_the_folder, folder=str(tmp_path), own=True):
        assert "ranks [1] do not see what rank 0 writes" in told


def accelerator(ranks=2, kind=DistributedType.MULTI_CPU):
    return SimpleNamespace(num_processes=ranks, distributed_type=kind)


def test_accelerate_that_does_something_else_is_refused(torchrun, monkeypatch):
    guards.require_what_accelerate_promised(accelerator())
    with pytest.raises(ValueError, match="train the same rows alone"):
        guards.require_what_accelerate_promised(accelerator(ranks=1))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="asks for FSDP, and accelerate has chosen MULTI_CPU"):
        guards.require_what_accelerate_promised(accelerator())
    guards.require_what_accelerate_promised(accelerator(kind=DistributedType.FSDP))
