"""Rows of a rank, tokens of all, and a step in which every token weighs the same."""

import torch

from recipes_lib.core.ranks import rank
from recipes_lib.core.ranks.collectives import sums_over_ranks
from recipes_lib.core.ranks.meshes import mesh_of
from recipes_lib.core.ranks.weighted_step import counted_tokens, rank_rows
from recipes_lib.core.ranks.weighted_step import tokens_of_all_ranks as tokens_of
from tests.core.refusal import refusal
from tests.parallel.parity import (
    global_batch,
    own_batches,
)


def rows_of_four():
    """The first row of each rank, by mesh; and what is refused."""
    both = mesh_of(replicate=2, shard=2)
    firsts_of_ranks = []
    for mesh in (None, both["replicate"], both):
        firsts = [0.0] * 4
        firsts[rank()] = rank_rows(8, mesh=mesh).start
        firsts_of_ranks.append(sums_over_ranks(*firsts))
    return firsts_of_ranks, refusal(rank_rows, 6)


def test_rows_of_meshes(four_ranks):
    """The mistake: ranks of one copy of the model read other rows, or two copies the same."""
    firsts, refused = four_ranks.run(rows_of_four)
    assert firsts == [[0, 2, 4, 6], [0, 0, 4, 4], [0, 2, 4, 6]]
    assert refused == "batch_size=6: give a multiple of the 4 ranks"
    assert rank_rows(6) == slice(0, 6)


def refused():
    """What is refused on both ranks, though only one of them is wrong; and what is counted."""
    batch = own_batches(0)[0]
    empty = dict(batch, labels=torch.full_like(batch["labels"], -100))
    messages = [refusal(tokens_of, batches) for batches in ([batch] * (1 + rank()), [empty])]
    counts = [tokens_of([batch]), counted_tokens(batch["labels"])]
    return messages, counts, tokens_of([[batch, empty][rank()]])


def test_refused_on_every_rank(two_ranks):
    """The mistakes: a rank that waits for a micro-batch that the other does not have; 0 / 0."""
    messages, counts, of_rank_0 = two_ranks.run(refused)
    assert "[1, 2] micro-batches" in messages[0]
    assert "no token is left" in messages[1]
    labels = global_batch(0)["labels"][:, 1:]
    assert counts == [(labels != -100).sum()] * 2
    assert of_rank_0 == (labels[:4] != -100).sum()  # the other one may have none
