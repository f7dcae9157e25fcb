"""Memory of the device, the host and the container: what is free, given back, and kept.

When a large tensor dies, the C library of Linux gives its memory back to the system. The next
tensor of this size gets new memory, and the system fills every page of it with zeros when it is
touched first. A training step frees and needs the same sizes again and again: hundreds of megabytes
of logits and activations per step. `keep_freed_memory` keeps them in the process. PyTorch's tuning
guide advises another allocator (jemalloc, TCMalloc) for the same reason. That has to be set before
Python starts; this does not. The process then stays about as large as it once was.

Source: mallopt(3), the manual page; PyTorch's "Performance Tuning Guide".
"""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

import psutil
import torch

from recipes_lib.core.measure.machine import machine

# From malloc.h, and the largest values that fit: one GiB, and what an int can hold.
M_TRIM_THRESHOLD = -1  # what is free at the end of the heap beyond it goes back: raise it
M_MMAP_THRESHOLD = -3  # above it, memory is mapped anew for each tensor: raise it
LARGEST_MAPPED = 2**30
LARGEST_KEPT = 2**31 - 1

CGROUP = Path("/sys/fs/cgroup")  # where Linux tells a container its limits


def keep_freed_memory() -> bool:
    """Ask the C library to keep what is freed, until this process ends; True if it does.

    Other systems than Linux, and other C libraries than glibc, are left as they are.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library, such as musl
        return False
    maps_less = mallopt(M_MMAP_THRESHOLD, LARGEST_MAPPED)
    keeps_more = mallopt(M_TRIM_THRESHOLD, LARGEST_KEPT)
    return bool(maps_less) and bool(keeps_more)


def release_memory() -> None:
    """Free what hangs in reference cycles, and give back what freed tensors had.

    For the time between two models. A GPU's allocator keeps the memory of the first one, and the
    second one would find gaps in it. Pinned memory of the host it never gives back by itself.
    """
    gc.collect()
    if machine().device == "cuda":
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()  # torch.accelerator.empty_host_cache, in newer versions


def free_memory_bytes() -> int:
    """Bytes of the device that nobody uses now. On a CPU those of `free_host_bytes`."""
    if machine().device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        # PyTorch keeps what freed tensors had, and gives it to the next ones.
        return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return free_host_bytes() + freed_and_kept_bytes()


def freed_and_kept_bytes() -> int:
    """Bytes that were freed and that the C library keeps for the next tensors; 0 without glibc."""
    if sys.platform != "linux":
        return 0
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = _MallocInfo
    return mallinfo().unused


class _MallocInfo(ctypes.Structure):
    """What mallinfo(3) returns: ten numbers, of which the ninth are bytes that nobody uses."""

    _fields_ = (
        ("before", ctypes.c_size_t * 8),
        ("unused", ctypes.c_size_t),
        ("after", ctypes.c_size_t),
    )


def free_host_bytes() -> int:
    """Bytes of the host that the system can give at once; a container's limit counts."""
    free = psutil.virtual_memory().available
    in_container = _free_in_container()
    if in_container is None:
        return free
    return min(free, in_container)


def _free_in_container() -> int | None:
    """Bytes up to the limit of the container (of its cgroup), or None if there is no limit."""
    # The files of version 2, then those of version 1. The third name is an entry in memory.stat.
    versions = [
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ]
    for limit_file, used_file, cached_name in versions:
        try:
            limit = (CGROUP / limit_file).read_text().strip()
            used = int((CGROUP / used_file).read_text())
            stat = (CGROUP / used_file).with_name("memory.stat").read_text()
            # Of the used bytes, those of files that were read: the system drops them when needed.
            cached = int(dict(line.split() for line in stat.splitlines())[cached_name])
        except (OSError, ValueError, KeyError):
            continue
        if limit != "max":  # as version 2 calls no limit; in version 1 it is a huge number
            return max(0, int(limit) - used + cached)
    return None
