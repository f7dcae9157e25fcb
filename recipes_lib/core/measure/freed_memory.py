"""Keep freed memory in the process, so that a step on a CPU does not fetch it again page by page.

When a large tensor dies, the C library of Linux gives its memory back to the system. The next
tensor of this size gets new memory, and the system fills every page of it with zeros when it is
touched first. A training step frees and needs the same sizes again and again: hundreds of megabytes
of logits and activations per step. Two settings of `malloc` keep them:

    M_MMAP_THRESHOLD    above it, memory is mapped anew for each tensor: raise it
    M_TRIM_THRESHOLD    what is free at the end of the heap beyond it goes back: raise it

The same memory is then used again. PyTorch's tuning guide advises another allocator (jemalloc,
TCMalloc) for the same reason. That has to be set before Python starts; this does not.

The price: the process stays about as large as it once was, and a little larger than before, for
there are holes between tensors that no other tensor fits into.

Source: mallopt(3), the manual page; PyTorch's "Performance Tuning Guide".
"""

from __future__ import annotations

import ctypes
import sys

# From malloc.h, and the largest values that fit: one GiB, and what an int can hold.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
LARGEST_MAPPED = 2**30
LARGEST_KEPT = 2**31 - 1


def keep_freed_memory() -> bool:
    """Ask the C library to keep what is freed; True if it does.

    It holds for this process until its end. Other systems than Linux, and other C libraries than
    glibc, are left as they are.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library, such as musl
        return False
    maps_less = mallopt(M_MMAP_THRESHOLD, LARGEST_MAPPED)
    keeps_more = mallopt(M_TRIM_THRESHOLD, LARGEST_KEPT)
    return bool(maps_less) and bool(keeps_more)
