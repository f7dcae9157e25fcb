"""Collectives on one tensor, and sums of numbers over the ranks of a mesh."""

import torch

from recipes_lib.core.ranks import rank
from recipes_lib.core.ranks.collectives import all_gather, reduce_scatter, sums_over_ranks
from recipes_lib.core.ranks.meshes import mesh_of


def gather_and_scatter():
    """Parts of two rows, and this rank's rows of a sum."""
    mine = torch.full((2, 3), float(rank()))
    whole = torch.empty(4, 3)
    all_gather(whole, mine)
    part = torch.empty(2, 3)
    reduce_scatter(part, whole + rank())
    return whole, part


def test_gather_and_scatter(two_ranks):
    whole, part = two_ranks.run(gather_and_scatter)
    assert whole[:, 0].tolist() == [0, 0, 1, 1]
    assert part.tolist() == [[0 + 0 + 1] * 3] * 2  # row 0 of both ranks, to which rank 1 adds 1


def sums_of_four():
    both = mesh_of(replicate=2, shard=2)
    return sums_over_ranks(rank(), mesh=both["shard"]), sums_over_ranks(rank(), 1, mesh=both)


def test_sums_along_one_axis_and_along_both(four_ranks):
    """The mistake: a sum over all ranks where those of one axis are meant."""
    along_one, along_both = four_ranks.run(sums_of_four)
    assert along_one == [0 + 1]
    assert along_both == [0 + 1 + 2 + 3, 4]


def test_a_process_that_is_alone_has_its_own_numbers():
    assert sums_over_ranks(2, 3.5) == [2, 3.5]
