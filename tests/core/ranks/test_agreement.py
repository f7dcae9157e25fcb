"""Ranks that differ, or of which one fails: all are told."""

import pytest
from torch import distributed, nn

from recipes_lib.core.ranks import rank, world_size
from recipes_lib.core.ranks.agreement import agree, same_error_on_all_ranks
from tests.core.refusal import refusal


def told_everyone(told):
    of_ranks = [None] * world_size()
    distributed.all_gather_object(of_ranks, told)
    return of_ranks


def differ(**of_rank_1):
    """Rank 1 gives other values; each rank's refusal, seen on rank 0."""
    given = {"stage": 2, "model": nn.Linear(4, 4)}
    if rank() == 1:
        given |= of_rank_1
    return told_everyone(refusal(agree, **given))


def test_ranks_that_differ_are_all_told(two_ranks):
    """The mistake: one rank raises and the other waits for it."""
    assert two_ranks.run(differ) == [None, None]
    told = two_ranks.run(differ, stage=3)
    assert told == ["stage: rank 0 gives 2, rank 1 gives 3; give the same on all ranks"] * 2
    # As many parameters, but one does not train.
    frozen = nn.Linear(4, 4)
    frozen.bias.requires_grad_(False)
    assert "model: rank 0 gives Linear of 20 parameters" in two_ranks.run(differ, model=frozen)[1]


def one_rank_fails():
    """What each rank is told when rank 1 fails alone, and when nobody does."""

    def work(*, fails):
        with same_error_on_all_ranks():
            if fails:
                raise OSError("the disk is full")

    return told_everyone([refusal(work, fails=rank() == 1), refusal(work, fails=False)])


def test_an_error_of_one_rank_is_one_of_all(two_ranks):
    """The mistake: rank 0 waits in the next collective for a rank that is gone."""
    assert two_ranks.run(one_rank_fails, timeout=30) == [["rank 1: the disk is full", None]] * 2
    with pytest.raises(ValueError, match="no such file"), same_error_on_all_ranks():
        raise OSError("no such file")
