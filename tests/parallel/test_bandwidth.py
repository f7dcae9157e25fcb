"""Times of collectives, the formulas of a ring, and a prediction that comes true."""

import time
from dataclasses import replace

import pytest
import torch
from torch import distributed

from recipes_lib.core.ranks import rank
from recipes_lib.core.ranks.agreement import agree
from recipes_lib.core.ranks.collectives import all_gather, reduce_scatter
from recipes_lib.core.ranks.meshes import default_mesh, mesh_of
from recipes_lib.core.ranks.rank_pool import RankPool
from recipes_lib.core.ranks.traffic import Traffic, count_traffic
from recipes_lib.parallel.bandwidth import (
    KINDS,
    BusPoint,
    Link,
    bus_factor,
    fit_link,
    measure_bus_bandwidth,
    predicted_collective_seconds,
    predicted_traffic_seconds,
    ring_all_reduce,
)

SIZES = [2**12, 2**16, 2**20, 2**22]
SHORT = {"rounds": 3, "round_seconds": 0.005}


# --- the idea -------------------------------------------------------------------------------------


def sum_in_a_ring():
    """A tensor that differs on each rank, summed by hand and by PyTorch, and the traffic."""
    uneven = torch.randn(5, 3) + rank()
    mine = torch.randn(4, 6) + rank()
    expected = [uneven.clone(), mine.clone()]
    for tensor in expected:
        distributed.all_reduce(tensor)
    ring_all_reduce(uneven)
    with count_traffic() as traffic:
        ring_all_reduce(mine)
    return [uneven, mine], expected, traffic


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ring_sums_and_sends_what_the_formula_says(ranks, request):
    """The mistake: a chunk that misses a summand, or an extra round."""
    pool = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[ranks])
    got, expected, traffic = pool.run(sum_in_a_ring)
    torch.testing.assert_close(got, expected)
    assert traffic.calls == {"send": 2 * (ranks - 1)}
    assert traffic.sent == 4 * 24 * bus_factor("all_reduce", ranks)


# --- the technique --------------------------------------------------------------------------------


def all_points():
    """Every kind over all sizes, and a step whose time is predicted from them."""
    points = {kind: measure_bus_bandwidth(kind, SIZES, **SHORT) for kind in KINDS}
    told = {kind: [point.seconds for point in each] for kind, each in points.items()}
    agree(points=told)  # every rank has the same
    return points


def test_every_kind_has_a_curve(two_ranks):
    for kind, points in two_ranks.run(all_points).items():
        assert [point.size for point in points] == SIZES
        assert {(point.kind, point.ranks) for point in points} == {(kind, 2)}
        assert all(point.seconds > 0 for point in points)
        # Small tensors pay for the messages: their bandwidth is a fraction of that of large ones.
        assert points[0].bus_bandwidth < points[-1].bus_bandwidth
        assert points[0].seconds < points[-1].seconds


def exchange_of_a_step(part, whole):
    """As `fully_shard` does it: parameters in forward and in backward, then gradients."""
    all_gather(whole, part)
    all_gather(whole, part)
    reduce_scatter(part, whole)


def predict_and_measure():
    """The exchange of a step of 2 MiB: what links predict, and the fastest of several, in turns."""
    sizes = [2**12, 2**18, 2**22]
    part, whole = torch.ones(2**18), torch.ones(2**19)
    with count_traffic() as traffic:
        exchange_of_a_step(part, whole)
    points = {"all_gather": [], "reduce_scatter": []}
    measured = []
    for _ in range(5):
        for kind, found in points.items():
            found += measure_bus_bandwidth(kind, sizes, **SHORT)
        for _ in range(5):
            distributed.barrier()
            start = time.perf_counter()
            exchange_of_a_step(part, whole)
            measured.append(time.perf_counter() - start)
    links = {kind: fit_link(found) for kind, found in points.items()}
    return traffic, predicted_traffic_seconds(traffic, links), min(measured)


def test_the_exchange_of_a_step_takes_about_what_is_predicted(two_ranks):
    """The bounds are wide, because the tests run on busy machines. The formulas have their own."""
    traffic, predicted, measured = two_ranks.run(predict_and_measure)
    assert traffic.bytes == {"all_gather": 2 * 2**21, "reduce_scatter": 2**21}
    assert predicted / 4 < measured < predicted * 4


def groups_of_two():
    """Along one axis of a mesh, both groups at the same time."""
    mesh = mesh_of(replicate=2, shard=2)
    points = []
    for kind in ("send", "broadcast", "all_reduce"):
        points += measure_bus_bandwidth(kind, [2**12], mesh=mesh["shard"], **SHORT)
    return [point.ranks for point in points]


def test_along_one_axis_of_a_mesh(four_ranks):
    """The mistake: numbers of all ranks as places in the group; the second group would hang."""
    assert four_ranks.run(groups_of_two) == [2, 2, 2]


# --- guards ---------------------------------------------------------------------------------------


def refusals():
    """The texts of all ValueErrors of this rank."""
    other_kind = ["all_reduce", "send"][rank()]
    wrong = {
        "differ": lambda: measure_bus_bandwidth(other_kind, [64]),
        "kind": lambda: measure_bus_bandwidth("allreduce", [64]),
        "none": lambda: measure_bus_bandwidth("send", []),
        "uneven": lambda: measure_bus_bandwidth("send", [64, 12]),
        "axes": lambda: measure_bus_bandwidth("send", [64], mesh=mesh_of(one=2, two=1)),
        "alone": lambda: measure_bus_bandwidth("send", [64], mesh=mesh_of(a=2, b=1)["b"]),
        "rounds": lambda: measure_bus_bandwidth("send", [64], rounds=0, mesh=default_mesh()),
    }
    found = {}
    for name, call in wrong.items():
        try:
            call()
        except ValueError as error:
            found[name] = str(error)
    agree(names=list(found))  # every rank has refused
    return found


def test_bad_input_is_refused_on_every_rank(two_ranks):
    found = two_ranks.run(refusals)
    assert "kind: rank 0 gives 'all_reduce', rank 1 gives 'send'" in found["differ"]
    assert "kind='allreduce': choose one of all_reduce" in found["kind"]
    assert "sizes=[]: give bytes" in found["none"]
    assert found["uneven"].startswith("size=12: give a multiple of 8")
    assert "a mesh of (2, 1) ranks: give one axis" in found["axes"]
    assert "a mesh of (1,) ranks: give one axis" in found["alone"]
    assert "rounds=0: give a whole number" in found["rounds"]


# --- the arithmetic -------------------------------------------------------------------------------


def test_the_factors_are_those_of_nccl_tests():
    assert bus_factor("all_reduce", 8) == 2 * 7 / 8
    for kind in ("all_gather", "reduce_scatter", "all_to_all"):
        assert bus_factor(kind, 8) == 7 / 8
    assert bus_factor("send", 8) == bus_factor("broadcast", 8) == 1
    point = BusPoint("all_reduce", size=1000, ranks=4, seconds=0.5)
    assert point.bandwidth == 2000
    assert point.bus_bandwidth == 3000


def exact_points(kind, ranks, latency, bytes_per_second, sizes=(10**3, 10**5, 10**6, 10**8)):
    """Points that lie on the formula."""
    facts = {"ranks": ranks, "latency": latency, "bytes_per_second": bytes_per_second}
    return [
        BusPoint(kind, size, ranks, predicted_collective_seconds(kind, size, **facts))
        for size in sizes
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_finds_latency_and_bandwidth(kind):
    link = fit_link(exact_points(kind, 4, 2e-5, 3e9))
    assert link.latency == pytest.approx(2e-5, rel=1e-6)
    assert link.bytes_per_second == pytest.approx(3e9, rel=1e-6)
    assert link.largest_residual < 1e-6
    assert link.seconds(0) == pytest.approx({"all_reduce": 6, "send": 1}.get(kind, 3) * 2e-5)


def test_a_point_off_the_line_is_told_and_of_two_the_faster_counts():
    points = exact_points("send", 2, 2e-5, 3e9)
    line = fit_link(points)
    slow = replace(points[1], seconds=1.0)
    assert fit_link([*points, slow]) == fit_link([slow, *points]) == line
    off = fit_link([points[0], slow, *points[2:]])
    assert off.largest_residual == pytest.approx(1 - line.seconds(slow.size))


def test_a_fit_that_says_nothing_is_refused():
    points = exact_points("send", 2, 1e-5, 1e9)
    with pytest.raises(ValueError, match="give points of 3 sizes or more"):
        fit_link(points[:2])
    with pytest.raises(ValueError, match="one kind of collective"):
        fit_link([*points, *exact_points("all_reduce", 2, 1e-5, 1e9)])
    falling = [BusPoint("send", size, 2, 1 / size) for size in (10, 100, 1000)]
    with pytest.raises(ValueError, match="does not grow with the bytes"):
        fit_link(falling)


def test_a_step_is_the_sum_of_its_calls():
    link = Link("all_reduce", ranks=2, latency=1e-3, bytes_per_second=1e6)
    traffic = Traffic(calls={"all_reduce": 3}, bytes={"all_reduce": 6000})
    # Three calls of two messages each, and 6,000 bytes that each rank sends.
    expected = 3 * 2 * 1e-3 + 6000 / 1e6
    assert predicted_traffic_seconds(traffic, {"all_reduce": link}) == pytest.approx(expected)
    with pytest.raises(ValueError, match="all_reduce: measure it"):
        predicted_traffic_seconds(traffic, {})
    with pytest.raises(ValueError, match="bytes_per_second=0: give a finite number above 0"):
        predicted_collective_seconds("send", 10, ranks=2, latency=0, bytes_per_second=0)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU for each rank")
def test_two_gpus():
    with RankPool(ranks=2, device="cuda") as pool:
        assert set(pool.run(all_points, timeout=120)) == set(KINDS)
