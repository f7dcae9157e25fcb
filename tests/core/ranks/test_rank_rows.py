"""Rows of a rank, and tokens and losses that are counted over all of them."""

import pytest
import torch

from recipes_lib.core.ranks import rank
from recipes_lib.core.ranks.collectives import sums_over_ranks
from recipes_lib.core.ranks.meshes import default_mesh, mesh_of
from recipes_lib.core.ranks.rank_rows import counted_tokens, global_mean_loss, rank_rows
from tests.core.refusal import refusal

LABELS = torch.tensor([[5, 6, 7, -100], [-100, -100, 8, 9], [1, -100, -100, -100], [1, 2, 3, 4]])


def rows_of_four():
    """The first row of each rank, by mesh; and what is refused."""
    both = mesh_of(replicate=2, shard=2)
    rows = {
        "all": rank_rows(8),
        "of the replicas": rank_rows(8, mesh=both["replicate"]),
        "of both axes": rank_rows(8, mesh=both),
    }
    firsts_of_ranks = {}
    for name, mine in rows.items():
        firsts = [0.0] * 4
        firsts[rank()] = mine.start
        firsts_of_ranks[name] = sums_over_ranks(*firsts)
    return firsts_of_ranks, refusal(rank_rows, 6)


def test_rows_of_meshes(four_ranks):
    firsts, refused = four_ranks.run(rows_of_four)
    assert firsts == {
        "all": [0, 2, 4, 6],
        "of the replicas": [0, 0, 4, 4],
        "of both axes": [0, 2, 4, 6],
    }
    assert refused == "batch_size=6: give a multiple of the 4 ranks"


def count_together():
    """What two ranks with unequal numbers of tokens find."""
    mine = LABELS[rank_rows(4)]
    mesh = default_mesh()
    return {
        "unshifted": counted_tokens(mine),
        "shifted": counted_tokens(mine, shifted=True, mesh=mesh),
        "mean": global_mean_loss(torch.tensor(6.0 * rank(), requires_grad=True), 1 + rank()),
        "none": refusal(global_mean_loss, 0.0, 0),
    }


def test_tokens_and_losses_are_those_of_all_ranks(two_ranks):
    got = two_ranks.run(count_together)
    assert got["unshifted"] == 2 + 2 + 0 + 3
    assert got["shifted"] == 3 + 2 + 1 + 4
    assert got["mean"] == pytest.approx(6 / 3)
    assert got["none"] == "no token of any rank counts: give labels that are not all -100"


def test_a_process_that_is_alone():
    assert rank_rows(6) == slice(0, 6)
    assert counted_tokens(LABELS) == 7
    assert global_mean_loss(6.0, 3) == 2
