"""The numbers in the message of an out-of-memory error, as versions of PyTorch write it.

Part of out_of_memory_doctor. Two of the messages, from torch 1 and from torch 2:

    Tried to allocate 2.93 GiB (GPU 0; 23.80 GiB total capacity; 12.04 GiB already allocated;
    2.82 GiB free; 19.69 GiB reserved in total by PyTorch)

    Tried to allocate 142.00 MiB. GPU 0 has a total capacity of 47.27 GiB of which 9.38 MiB is free.
    Including non-PyTorch memory, this process has 3.14 GiB memory in use. Of the allocated memory
    2.92 GiB is allocated by PyTorch, and 34.62 MiB is reserved by PyTorch but unallocated.
"""

from __future__ import annotations

import re

SIZE = r"\d[\d.,]*(?: (?:bytes|[KMG]i?B))?"  # 2.93 GiB, or 116813856768

# What a number means, and the words around it. Each alternative is from another version or device.
MESSAGE = {
    "requested": rf"[Tt]ried to allocate {SIZE}",
    "free": rf"of which {SIZE} is free|{SIZE} free",
    # "capacty" is how torch 2.0 spells it; "total capacity;" comes from torch 1. The last two are
    # a Mac's, and that of an emulated limit (core.measure.PeakMemory).
    "capacity": rf"total capaci?ty of {SIZE}|{SIZE} total capacity|max allowed: {SIZE}"
    rf"|the limit is {SIZE}",
    "allowed": rf"{SIZE} allowed",  # by set_per_process_memory_fraction
    "allocated": rf"{SIZE} is allocated by|{SIZE} already allocated|MPS allocated: {SIZE}"
    rf"|{SIZE} of tensors",
    "unallocated": rf"{SIZE} is reserved by PyTorch but unallocated",
    "reserved": rf"{SIZE} reserved in total",  # torch 1: allocated and unallocated together
    "this process": rf"this process has {SIZE}",
}

# Some errors have no numbers at all.
OUT_OF_MEMORY = "out of memory|OutOfMemory|_ALLOC_FAILED"
OUT_OF_DEVICE_MEMORY = "CUDA|MPS|HIP|OutOfMemory|Tried to allocate|DefaultCPUAllocator"

# The words of Linux when the host's memory is used up, of the shell, of launchers and of clusters:
# the kernel ends the process with signal 9, and an exit status of 128 + 9 says so.
KILLED = r"\bkilled\b|oom.?kill|exit (code|status):? 137\b|exitcode\s*: -9\b|SIGKILL|signal 9\b"
# In the log of the kernel: what the process held of the host's memory.
RESIDENT = r"anon-rss:(\d+)kB"

# By their first letter: "bytes", "KiB" …; without a unit it is bytes.
UNITS = {"": 1, "b": 1, "K": 2**10, "M": 2**20, "G": 2**30}

# What nobody accounts for is held by other processes, or, up to this size, by our own CUDA context.
OWN_CONTEXT = 2 * 2**30


def parse_error(error: str) -> dict[str, int]:
    """The numbers of the message in bytes, as far as it has them.

    They are the keys of MESSAGE, and `others`: what other processes hold. Of a process that the
    kernel has killed there is at most `this process`.
    Raises ValueError for an error of another kind.
    """
    text = " ".join(error.split())  # a terminal may have wrapped it
    said = {}
    if was_killed(error):
        resident = re.search(RESIDENT, text)
        if resident:
            said["this process"] = int(resident[1]) * 2**10
        return said
    for name, pattern in MESSAGE.items():
        match = re.search(pattern, text)
        if match:
            said[name] = _bytes(match[0])
    if not said and not re.search(OUT_OF_MEMORY, text):
        raise ValueError(f"this is not an out-of-memory error: {text[:200]!r}")

    if "reserved" in said:
        said["unallocated"] = said["reserved"] - said["allocated"]
    if {"capacity", "free", "allocated", "unallocated"} <= said.keys():
        said["others"] = _held_by_others(said)
    return said


def was_killed(error: str) -> bool:
    """Whether the error says that the kernel has ended the process, and nothing of a device."""
    text = " ".join(error.split())
    if re.search(OUT_OF_DEVICE_MEMORY, text):
        return False
    return re.search(KILLED, text, re.IGNORECASE) is not None


def _bytes(words: str) -> int:
    """The first size in `words`, such as "2.93 GiB", in bytes."""
    size = re.search(SIZE, words)[0]
    number, _, unit = size.partition(" ")
    # The size may stand before a comma or at the end of a sentence.
    number = number.rstrip(".,").replace(",", "")
    return int(float(number) * UNITS[unit[:1]])


def _held_by_others(said: dict[str, int]) -> int:
    ours = said.get("this process", said["allocated"] + said["unallocated"])
    others = said["capacity"] - said["free"] - ours
    if others <= OWN_CONTEXT:
        return 0
    return others
