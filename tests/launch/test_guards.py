"""launch/guards.py: a start that would train something else is refused."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType

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


@pytest.mark.parametrize("library", ["FSDP", "DEEPSPEED"])
def test_settings_that_nobody_reads_are_refused(monkeypatch, library):
    guards.refuse_settings_of_accelerate()
    monkeypatch.setenv(f"ACCELERATE_USE_{library}", "true")
    with pytest.raises(ValueError, match=library):
        guards.refuse_settings_of_accelerate()


def test_ranks_that_would_share_a_gpu_are_refused(torchrun, monkeypatch):
    guards.require_gpu_for_each_rank("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", one)
    with pytest.raises(ValueError, match=r"2 ranks on a machine with 1 visible GPU"):
        guards.require_gpu_for_each_rank("cuda")


def one():
    return 1


def rows_of(kind):
    """On a rank: do the guards take rows that are the same on all ranks, and others?"""
    rows = torch.arange(6).view(2, 3)
    if kind == "other":
        rows = rows + torch.distributed.get_rank()
    taken = []
    for shared in (True, False):
        try:
            guards.require_rows_of_ranks(rows, shared=shared)
            taken.append(shared)
        except ValueError:
            pass
    return taken


def test_rows_of_ranks(two_ranks):
    """Ranks that divide a batch read other rows, and ranks that divide a layer the same."""
    assert two_ranks.run(rows_of, kind="same") == [True]
    assert two_ranks.run(rows_of, kind="other") == [False]


def told_about_the_folder(folder, own):
    """On ranks: what each is told about a folder that all share, or about one of its own."""
    folder = Path(folder)
    if own:
        folder = folder / str(torch.distributed.get_rank())
        folder.mkdir()
    try:
        guards.require_shared_folder(folder)
        told = ""
    except ValueError as error:
        told = str(error)
    of_all_ranks = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(of_all_ranks, told)
    return of_all_ranks


def test_a_folder_that_is_not_shared_is_refused(two_ranks, tmp_path):
    """Each machine has a folder of that name; a checkpoint would lie in parts on all of them."""
    assert two_ranks.run(told_about_the_folder, folder=str(tmp_path), own=False) == ["", ""]
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
