"""Short sequences whose end is known from PyTorch's rules."""

import pytest

from recipes_lib.core.predict.allocator import MIB, Allocator


def taken(*sizes, **options):
    """An allocator that has handed out these sizes, as storages 0, 1, …"""
    allocator = Allocator(**options)
    for number, size in enumerate(sizes):
        allocator.changed(number, size)
    return allocator


def freed(allocator, *numbers):
    for number in numbers:
        allocator.changed(number, -1)
    return allocator


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB, 12 * MIB),  # less than 1 MiB is left: it is not split off
    ],
)
def test_sizes_are_rounded_and_come_from_segments(size, allocated, reserved):
    """The mistake: a size at one of the borders falls on the other side of it."""
    allocator = taken(size)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_small_blocks_share_a_segment_and_large_ones_another():
    """The mistake: a small one is cut out of a large segment."""
    assert taken(*4 * [MIB // 2]).reserved == 2 * MIB
    assert taken(*5 * [MIB // 2]).reserved == 4 * MIB
    assert taken(4 * MIB, 512).reserved == 22 * MIB
    assert taken(*5 * [4 * MIB]).reserved == 20 * MIB


def test_neighbours_merge():
    """The mistake: two halves that are free are no room for a whole."""
    allocator = taken(6 * MIB, 6 * MIB, 8 * MIB)
    freed(allocator, 0, 1).changed(3, 12 * MIB - 512)
    assert allocator.reserved == 20 * MIB
    apart = freed(taken(6 * MIB, 6 * MIB, 8 * MIB), 0, 2)
    apart.changed(3, 9 * MIB)
    assert apart.reserved == 40 * MIB, "8 and 6 MiB with a block between them"


def test_the_smallest_that_is_large_enough_is_taken():
    """The mistake: the first fit leaves no room for the larger one that follows."""
    allocator = freed(taken(30 * MIB, 12 * MIB), 0, 1)
    allocator.changed(2, 12 * MIB)
    allocator.changed(3, 30 * MIB)
    assert allocator.reserved == 42 * MIB


def test_peaks_restart():
    """The mistake: the peak of the first step, in which states are made, is that of the second."""
    allocator = freed(taken(30 * MIB, 4 * MIB), 0)
    assert allocator.peak_allocated == 34 * MIB
    allocator.restart_peak()
    assert allocator.peak_allocated == 4 * MIB
    assert allocator.peak_reserved == 50 * MIB, "what is reserved is not given back"


def test_free_segments_go_back_when_asked_or_when_nothing_is_left():
    """The mistake: reserved bytes beyond the card, where PyTorch empties its cache first."""
    allocator = freed(taken(30 * MIB, 40 * MIB), 0)
    allocator.empty_cache()
    assert allocator.reserved == 40 * MIB  # the segment that is in use stays
    limited = freed(taken(30 * MIB, 40 * MIB, limit_bytes=100 * MIB), 0)
    limited.changed(2, 50 * MIB)
    assert (limited.reserved, limited.peak_reserved) == (90 * MIB, 90 * MIB)
