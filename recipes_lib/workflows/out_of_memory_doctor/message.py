"""What the text of an out-of-memory error says: who asked, of which memory, and for how much.

Part of out_of_memory_doctor. A source is a library or a system that writes such texts, and SOURCES
has a line for each of its forms. The first line that matches the text is the source.

    place        whose memory is full: of a GPU (CUDA, ROCm, XPU), of a Mac (MPS), of the host …
    …            anything, or nothing: what follows it may be missing
    {asked}      a size, and its name in the `Message`
    [A-Z.*]      otherwise a line is a regular expression, and "(" is a bracket
"""

from __future__ import annotations

import re
from dataclasses import dataclass

GPUS = ("CUDA", "ROCm", "XPU")

# source | place | the text. A place in {place} is read from the text.
SOURCES = """
Triton | one block of a GPU | out of resource: shared memory, Required: {asked}, Hardware limit: \
{limit}
shared memory | shared memory | [Bb]us error|/dev/shm|out of shared memory|shared memory segment|\
</torch_\\w+>: (No space|Cannot allocate)
one block of XPU | XPU | block with size larger than 4GB … Tried to allocate {asked} … {limit} total
PyTorch 1 | {place} | {place} out of memory\\. Tried to allocate {asked} \\(GPU {device}; {limit} \
total capacity … {allocated} already allocated … {free} free … {unallocated} cached … {reserved} \
reserved
PyTorch | {place} | {place} out of memory … Tried to allocate {asked} … GPU {device} has … total \
capaci?ty of {limit} … of which {free} is free … this process has {ours} … {allowed} allowed; … \
{allocated} is allocated by … {unallocated} is reserved by PyTorch but unallocated
PyTorch | MPS | MPS backend out of memory … MPS allocated: {allocated} … max allowed: {limit} … \
Tried to allocate {asked}
one buffer of Metal | MPS | Invalid buffer size: {asked}
one buffer of Metal | MPS | total bytes of NDArray
an emulated limit | CUDA | emulated out of memory: {allocated} of tensors … the limit is {limit}
DefaultCPUAllocator | host | DefaultCPUAllocator: … tried to allocate {asked}
NumPy | host | Unable to allocate (?:{asked} for )?(?:an )?array
Windows | paging file | WinError 1455|os error 1455|paging file is too small
accelerate | loading | Some modules are dispatched on the CPU or the disk|offloaded to the \
(cpu|disk)|offload the whole model to the disk
bitsandbytes | CUDA | Error out of memory at line \\d+ in file
NCCL | CUDA | NCCL.*(out of memory|[Ff]ailed to CUDA \\w*alloc)|nccl\\w*Error.*out of memory
cuBLAS or cuDNN | CUDA | (CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_(\\w*ALLOC_FAILED|NOT_INITIALIZED)
rocBLAS or MIOpen | ROCm | rocblas_status_memory_error|HIPBLAS_STATUS_ALLOC_FAILED|miopenStatusAlloc
driver | CUDA | CUDA (driver )?error: out of memory|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAlloc
driver | ROCm | HIP error: out of memory|hipErrorOutOfMemory
driver | XPU | ERROR_OUT_OF_(DEVICE_MEMORY|RESOURCES)
kernel of a notebook | host | [Kk]ernel .{0,40}(appears to have |has )?died|[Kk]ernel crashed \
while|Canceled future for execute_request|session crashed|tried to allocate more memory than is \
available
Linux | host | anon-rss:{resident}
Linux | host | (?i:\\bkilled\\b(?! by signal: [^k])|oom.?kill|kill process \\d|error 137\\b|\
exit ?(code|status):? 137\\b|exited with code 137\\b|\
exitcode\\s*: -9\\b|SIGKILL|signal:? 9\\b|return code -9\\b)
host | host | (?<!OutOf)MemoryError|std::bad_alloc|Cannot allocate memory|os error 12\\b|\
OUT_OF_HOST_|could not create a (memory|primitive)|cudaHostAlloc|pinned memory|[Hh]eap space|\
[Hh]eap out of memory
a GPU | CUDA | out of memory|OutOfMemory
"""
PLACES = {"HIP": "ROCm"}  # where the text has another name
SIZE = r"\d[\d.,]*(?: ?(?:bytes|[kKMGT]i?B))?"  # 2.93 GiB, or 116813856768
# By the first letter: "bytes", "KiB" …; without a unit it is bytes.
UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

# What nobody accounts for is held by other processes, or, up to this size, by our own CUDA context.
OWN_CONTEXT = 2 * 2**30


@dataclass(frozen=True)
class Message:
    """What an error's message says, in bytes as far as it does."""

    allocator: str  # the source of SOURCES
    place: str
    device: str = ""  # its number
    asked: int | None = None
    free: int | None = None
    limit: int | None = None  # of this process
    allocated: int | None = None
    unallocated: int | None = None  # held by PyTorch, and in no tensor
    others: int | None = None  # held by other processes
    resident: int | None = None  # held by a process that Linux has ended

    @property
    def where(self) -> str:
        """The place with the number of its device: "CUDA 0"."""
        return f"{self.place} {self.device}".strip()

    @property
    def sizes(self) -> dict[str, int]:
        """The numbers of bytes that are known and not zero, by their names."""
        return {name: size for name, size in vars(self).items() if size and isinstance(size, int)}


def read_message(error: str) -> Message:
    """What the text of the error says.

    Raises ValueError for a text of no source: it quotes it, with the questions that would decide.
    """
    text = " ".join(error.split())  # a terminal may have wrapped it
    for line in SOURCES.strip().splitlines():
        allocator, place, form = line.split(" | ", 2)
        match = re.search(_expression_of_line(form), text)
        if match:
            found = match.groupdict()
            if place == "{place}":
                place = PLACES.get(found["place"], found["place"])
            return _message_of_line(allocator, place, found)
    raise ValueError(
        f"this is not an out-of-memory error that is known here: {text[:200]!r}. Three questions "
        f"decide: is the memory of the GPU (nvidia-smi) or of the host (free -h) full in the "
        f"second before? Does it come while loading, in the first step, or after many steps? Does "
        f"one row of 16 tokens run?"
    )


def _expression_of_line(form: str) -> str:
    """The regular expression of a line: "a … {asked}" becomes "a(?:.*?(?P<asked>size))?"."""
    first, *others = form.split(" … ")
    whole = first + "".join(f"(?:.*?{part})?" for part in others)
    whole = whole.replace("{place}", "(?P<place>CUDA|HIP|XPU)").replace(
        "{device}", r"\s*(?P<device>\d+)"
    )
    return re.sub(r"\{([a-z]+)\}", r"(?P<\1>SIZE)", whole).replace("SIZE", SIZE)


def _message_of_line(allocator: str, place: str, found: dict[str, str | None]) -> Message:
    """The sizes that an error's text has named, and those that follow from them."""
    said = {}
    for name, words in found.items():
        if words is not None and name not in ("place", "device"):
            said[name] = _bytes(words)
    if "reserved" in said:  # of torch 1: allocated and unallocated together
        said["unallocated"] = said.pop("reserved") - said.get("allocated", 0)
    ours = said.pop("ours", said.get("allocated", 0) + said.get("unallocated", 0))
    if {"limit", "free", "allocated", "unallocated"} <= said.keys():
        others = said["limit"] - said["free"] - ours
        said["others"] = others if others > OWN_CONTEXT else 0
    if "limit" in said:
        said["limit"] = said.pop("allowed", said["limit"] - said.get("others", 0))
    return Message(allocator, place, found.get("device") or "", **said)


def _bytes(words: str) -> int:
    """A size in an error's message such as "2.93 GiB", in bytes."""
    number, unit = re.fullmatch(r"([\d.,]+)\s*(.*)", words).groups()
    # The size may stand before a comma or at the end of a sentence.
    number = number.rstrip(".,").replace(",", "")
    return int(float(number) * UNITS[unit[:1].upper()])
