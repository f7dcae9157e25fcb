"""A function on new ranks: its result, its error, and no process afterwards.

What a rank may do wrong is tested where ranks are ended: `test_rank_pool.py`.
"""

import os

import pytest
import torch
from torch import distributed

from recipes_lib.core.ranks import launch as module
from recipes_lib.core.ranks.launch import launch
from recipes_lib.core.ranks.rank_pool import RankError
from tests.copied_ranks import copied_ranks


def add_up(start):
    """The sum over all ranks of `start` + rank, the threads, and the number of the process."""
    number = torch.tensor(float(start + distributed.get_rank()))
    distributed.all_reduce(number)
    return number.item(), torch.get_num_threads(), os.getpid()


def each_refuses_for_itself():
    """Every rank finds another mistake."""
    raise ValueError(f"rank {distributed.get_rank()} has no rows")


def test_all_ranks_compute_together_and_end():
    """The mistake: every rank alone, or processes that stay."""
    total, threads, process = launch(add_up, ranks=2, device="cpu", threads=2, start=10)
    assert total == 10 + 11
    assert threads == 2
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_different_mistakes_are_all_told(monkeypatch):
    """The mistake: only that of the first rank, as if all had found it."""
    monkeypatch.setattr(module, "RankPool", copied_ranks)
    with pytest.raises(RankError, match=r"(?s)2 of 2 .*rank 0 has no rows.*rank 1 has no rows"):
        launch(each_refuses_for_itself, ranks=2, device="cpu")


def test_bad_input_is_refused_before_anything_starts():
    with pytest.raises(ValueError, match="ranks=0: give a whole number of 1 or more"):
        launch(add_up, ranks=0, start=1)
