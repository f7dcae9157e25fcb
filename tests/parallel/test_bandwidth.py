"""Times of collectives, and the formulas of a ring."""

import pytest

from recipes_lib.core.ranks.agreement import agree
from recipes_lib.parallel.bandwidth import (
    BusPoint,
    Link,
    fit_link,
    measure_bus_bandwidth,
)

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "send")
SIZES = [2**12, 2**16, 2**20, 2**22]


# --- the technique --------------------------------------------------------------------------------


def all_points():
    """Every kind over all sizes."""
    points = {kind: measure_bus_bandwidth(kind, SIZES) for kind in KINDS}
    told = {kind: [point.seconds for point in each] for kind, each in points.items()}
    agree(points=told)  # every rank has the same
    return points


def test_every_kind_has_a_curve(two_ranks):
    """The mistake: a call that does nothing, or a time of one rank for all."""
    for kind, points in two_ranks.run(all_points).items():
        assert [point.size for point in points] == SIZES
        assert {(point.kind, point.ranks) for point in points} == {(kind, 2)}
        assert all(point.seconds > 0 for point in points)
        # Small tensors pay for the messages: their bandwidth is a fraction of that of large ones.
        assert points[0].bus_bandwidth < points[-1].bus_bandwidth
        assert points[0].seconds < points[-1].seconds


# --- the arithmetic -------------------------------------------------------------------------------


def exact_points(link):
    """Points that lie on the formula."""
    sizes = (10**3, 10**5, 10**6, 10**8)
    return [BusPoint(link.kind, size, link.ranks, link.seconds(size)) for size in sizes]


@pytest.mark.parametrize("kind", ["all_reduce", "send"])
def test_a_fit_finds_latency_and_bandwidth(kind):
    """The mistake: a latency of all messages of a ring together."""
    link = Link(kind, ranks=4, latency=2e-5, bytes_per_second=3e9)
    found = fit_link(exact_points(link))
    assert found.latency == pytest.approx(2e-5, rel=1e-6)
    assert found.bytes_per_second == pytest.approx(3e9, rel=1e-6)
    assert link.seconds(0) == pytest.approx({"all_reduce": 6, "send": 1}[kind] * 2e-5)
