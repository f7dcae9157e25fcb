"""PyTorch's allocator for a GPU, replayed: what it gives out, and what it keeps from others.

A GPU's memory is asked for in *segments*. Of these the allocator hands out *blocks*, and what is
given back is used again. So it *reserves* more than is *allocated*, and it is the reserved bytes
that run out:

    size         rounded up to 512 bytes
    up to 1 MiB  from segments of 2 MiB
    up to 10 MiB from segments of 20 MiB
    above        from a segment of its own, in multiples of 2 MiB
    taken is     the smallest free block that is large enough; the rest is split off,
                 if it is worth it (512 bytes of a small one, 1 MiB of a large one)
    given back   a block merges with free neighbours of its segment

With `expandable_segments:True`, which `machine()` asks for on a GPU, segments grow at their ends
instead. That is not replayed.

Source: c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.13, one stream.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass

from recipes_lib.core.measure.live_bytes import Listener

MIB = 2**20
ROUNDED = 512
SMALL = MIB  # the largest size that comes from a segment of small blocks
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OF_ITS_OWN = 10 * MIB  # from this size on


@dataclass(eq=False)
class Block:
    """A piece of a segment, with its neighbours there."""

    size: int
    small: bool
    number: int
    free: bool = True
    before: Block | None = None
    after: Block | None = None

    @property
    def place(self) -> tuple[int, int]:
        """By which free blocks are sorted: the best fit comes first."""
        return self.size, self.number


class Allocator(Listener):
    """Follows every storage, as a listener of `LiveBytes`."""

    def __init__(self, *, limit_bytes: int | None = None) -> None:
        self.allocated = 0
        self.reserved = 0
        self.peak_allocated = 0
        self.peak_reserved = 0
        self._limit = limit_bytes
        self._free: dict[bool, list[Block]] = {True: [], False: []}
        self._of: dict[int, Block] = {}  # by the number of a storage
        self._numbers = itertools.count()

    def take_workspaces(self, size: int) -> None:
        """cuBLAS has one workspace for the thread of forward, and one for that of backward."""
        for storage in (-1, -2):
            self.changed(storage, size)

    def restart_peak(self) -> None:
        """Forget what was allocated before. What is reserved stays so."""
        self.peak_allocated = self.allocated
        self.peak_reserved = self.reserved

    def empty_cache(self) -> None:
        """Give free segments back, as `torch.cuda.empty_cache()` does."""
        for free in self._free.values():
            for block in list(free):
                if block.before is None and block.after is None:
                    self._take_out_block(block)
                    self.reserved -= block.size

    # --- what the account tells ---

    def changed(self, number: int, change: int) -> None:
        """A storage was made, resized or freed: the allocator takes or gives a block."""
        if number in self._of:
            self._give_block_back(self._of.pop(number))
        if change > 0:
            self._of[number] = self._take_block(change)

    # --- blocks ---

    def _take_block(self, size: int) -> Block:
        """As PyTorch's allocator does: the best free block, or one of a new segment."""
        size = max(ROUNDED, -(-size // ROUNDED) * ROUNDED)
        small = size <= SMALL
        block = self._best_fit(size, small)
        if block is None:
            block = Block(_segment_bytes(size, small), small, next(self._numbers))
            self._reserve_segment(block.size)
        self._split_block(block, size)
        block.free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def _best_fit(self, size: int, small: bool) -> Block | None:
        free = self._free[small]
        at = bisect.bisect_left(free, (size, -1), key=lambda block: block.place)
        return free.pop(at) if at < len(free) else None

    def _split_block(self, block: Block, size: int) -> None:
        """Cut a block, if what is left of it may be used for another tensor."""
        rest = block.size - size
        worth_it = rest >= ROUNDED if block.small else rest > SMALL
        if not worth_it:
            return
        other = Block(rest, block.small, next(self._numbers), before=block, after=block.after)
        if block.after is not None:
            block.after.before = other
        block.after = other
        block.size = size
        self._put_block(other)

    def _give_block_back(self, block: Block) -> None:
        """As PyTorch's allocator does: a free block joins its free neighbours."""
        self.allocated -= block.size
        block.free = True
        if block.after is not None and block.after.free:
            self._take_out_block(block.after)
            self._join_blocks(block, block.after)
        if block.before is not None and block.before.free:
            first = block.before
            self._take_out_block(first)
            self._join_blocks(first, block)
            block = first
        self._put_block(block)

    def _join_blocks(self, first: Block, second: Block) -> None:
        """Both are one block from now on, which is called `first`."""
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first

    def _put_block(self, block: Block) -> None:
        bisect.insort(self._free[block.small], block, key=lambda each: each.place)

    def _take_out_block(self, block: Block) -> None:
        free = self._free[block.small]
        free.pop(bisect.bisect_left(free, block.place, key=lambda each: each.place))

    def _reserve_segment(self, size: int) -> None:
        """Ask the driver for a segment, and beyond the limit give free ones back first."""
        if self._limit is not None and self.reserved + size > self._limit:
            self.empty_cache()
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)


def _segment_bytes(size: int, small: bool) -> int:
    """Bytes that are asked of the driver for a block of this size."""
    if small:
        return SMALL_SEGMENT
    if size < OF_ITS_OWN:
        return LARGE_SEGMENT
    return -(-size // SMALL_SEGMENT) * SMALL_SEGMENT
