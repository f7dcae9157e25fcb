"""Calls and bytes of collectives, of every part of PyTorch that makes them."""

import torch
from torch import distributed
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from recipes_lib.core.ranks import rank, world_size
from recipes_lib.core.ranks.collectives import all_gather, reduce_scatter
from recipes_lib.core.ranks.meshes import mesh_of
from recipes_lib.core.ranks.traffic import count_traffic

SIZE = 4 * 24  # bytes of 24 numbers in fp32


def collectives_by_hand():
    """Each kind once, on 24 numbers."""
    ranks = world_size()
    whole = torch.ones(24)
    part = torch.ones(24 // ranks)
    parts = list(torch.ones(24).chunk(ranks))
    with count_traffic() as traffic:
        distributed.all_reduce(whole)
        all_gather(whole, part)
        distributed.all_gather(parts, part)
        reduce_scatter(part, whole)
        distributed.reduce_scatter(part, parts)
        distributed.all_to_all_single(torch.empty(24), whole)
        distributed.all_to_all(list(torch.ones(24).chunk(ranks)), parts)
        distributed.broadcast(whole, src=0)
        distributed.reduce(whole, dst=0)
        distributed.barrier()
        target = (rank() + 1) % ranks
        source = (rank() - 1) % ranks
        calls = [
            distributed.P2POp(distributed.isend, whole, target),
            distributed.P2POp(distributed.irecv, torch.empty(24), source),
        ]
        for work in distributed.batch_isend_irecv(calls):
            work.wait()
    distributed.all_reduce(whole)  # outside
    return traffic


def check_by_hand(traffic, ranks):
    assert traffic.calls == {
        "all_reduce": 1,
        "all_gather": 2,
        "reduce_scatter": 2,
        "all_to_all": 2,
        "broadcast": 1,
        "reduce": 1,
        "send": 1,
    }
    once = SIZE * (ranks - 1) / ranks
    expected = {kind: calls * once for kind, calls in traffic.calls.items()}
    assert traffic.sent_by_kind == expected | {"all_reduce": 2 * once, "send": SIZE}
    assert traffic.sent == round(sum(traffic.sent_by_kind.values()))


def uneven_and_small_groups():
    """Rank 0 keeps 5 of 6 numbers; then a sum over two of four ranks, then over a place."""
    give = [1] * 4
    give[rank()] = 3
    with count_traffic() as to_all:
        distributed.all_to_all_single(
            torch.empty(6), torch.ones(6), output_split_sizes=give, input_split_sizes=give
        )
    mesh = mesh_of(rows=2, columns=2)
    with count_traffic() as of_two:
        distributed.all_reduce(torch.ones(24), group=mesh.get_group("columns"))
    split = distribute_tensor(torch.ones(24), mesh["rows"], [Shard(0)])
    with count_traffic() as of_dtensor:
        split.redistribute(placements=[Replicate()]).to_local()
    return collectives_by_hand(), to_all, of_two, of_dtensor


def test_four_ranks_and_groups_of_two(four_ranks):
    """The mistake: the number of all ranks where a group has fewer."""
    by_hand, to_all, of_two, of_dtensor = four_ranks.run(uneven_and_small_groups)
    check_by_hand(by_hand, 4)
    assert to_all.sent_by_kind == {"all_to_all": 24 - 12}
    assert of_two.sent_by_kind == {"all_reduce": SIZE}
    assert of_dtensor.sent_by_kind == {"all_gather": SIZE / 2}
