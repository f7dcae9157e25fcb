"""Messages as they were printed by PyTorch 1.12 to 2.6, on GPUs, a Mac and a CPU."""

import pytest
import torch

from recipes_lib.core.measure import PeakMemory
from recipes_lib.workflows.out_of_memory_doctor.message import parse_error, was_killed

MIB, GIB = 2**20, 2**30

TORCH_1 = (
    "RuntimeError: CUDA out of memory. Tried to allocate 2.93 GiB (GPU 0; 23.80 GiB total "
    "capacity; 12.04 GiB already allocated; 2.82 GiB free; 19.69 GiB reserved in total by PyTorch) "
    "If reserved memory is >> allocated memory try setting max_split_size_mb to avoid "
    "fragmentation.  See documentation for Memory Management"
)
TORCH_2_0 = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.70 GiB. GPU 0 has a "
    "total capacty of 6.00 GiB of which 0 bytes is free. Of the allocated memory 2.93 GiB is "
    "allocated by PyTorch, and 2.30 GiB is reserved by PyTorch but unallocated. If reserved but "
    "unallocated memory is large try setting max_split_size_mb"
)
TORCH_2_6 = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 142.00 MiB. GPU 0 has a total "
    "capacity of 47.27 GiB of which 9.38 MiB is free. Process 2925282 has 29.04 GiB memory in use. "
    "Process 3120922 has 14.74 GiB memory in use. Including non-PyTorch memory, this process has "
    "3.14 GiB memory in use. Of the allocated memory 2.92 GiB is allocated by PyTorch, and 34.62 "
    "MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try "
    "setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
)
GRAPHS_AND_CAP = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 80.00 GiB of "
    "which 60.00 GiB is free. Including non-PyTorch memory, this process has 19.90 GiB memory in "
    "use. 20.00 GiB allowed; Of the allocated memory 19.00 GiB is allocated by PyTorch, with 30.00 "
    "MiB allocated in private pools (e.g., CUDA Graphs), and 240.00 MiB is reserved by PyTorch but "
    "unallocated."
)
MPS = (
    "RuntimeError: MPS backend out of memory (MPS allocated: 17.50 GiB, other allocations: 384.00 "
    "KiB, max allowed: 18.13 GiB). Tried to allocate 1.00 GiB on private pool."
)
CPU = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't "
    "allocate memory: you tried to allocate 116813856768 bytes. Error code 12 (Cannot allocate "
    "memory)"
)

KERNEL_LOG = (
    "[88.1] Out of memory: Killed process 4711 (python) total-vm:41943040kB, anon-rss:24222105kB, "
    "file-rss:0kB, shmem-rss:0kB, UID:1000 pgtables:48000kB oom_score_adj:0"
)

IN_GIB = {
    # Of torch 1: what is reserved but unallocated is not said, it is a difference.
    TORCH_1: {
        "requested": 2.93,
        "capacity": 23.8,
        "allocated": 12.04,
        "free": 2.82,
        "unallocated": 7.65,
    },
    # 0.77 GiB are not accounted for: our own CUDA context, not another process.
    TORCH_2_0: {
        "requested": 1.7,
        "capacity": 6,
        "free": 0,
        "allocated": 2.93,
        "unallocated": 2.3,
        "others": 0,
    },
    TORCH_2_6: {
        "requested": 142 / 1024,
        "capacity": 47.27,
        "unallocated": 34.62 / 1024,
        "others": 44.12,
    },
    # The private pools stand between "allocated" and "unallocated".
    GRAPHS_AND_CAP: {
        "requested": 1.5,
        "allowed": 20,
        "allocated": 19,
        "unallocated": 240 / 1024,
        "others": 0,
    },
    MPS: {"requested": 1, "capacity": 18.13, "allocated": 17.5},
    CPU: {"requested": 116813856768 / GIB},
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`": {},
    "CUDA error: out of memory": {},
}


@pytest.mark.parametrize("error", IN_GIB)
def test_reads_the_messages_of_many_versions(error):
    """The mistake: a number of one version under the name of another."""
    numbers = parse_error(error.replace(" ", "\n", 20))  # as a terminal wraps it
    for name, gib in IN_GIB[error].items():
        assert numbers[name] == pytest.approx(gib * GIB, rel=1e-3, abs=0.01 * GIB), name


def test_reads_the_emulated_error():
    """The words of core.measure, which could change without those here."""
    with pytest.raises(torch.OutOfMemoryError) as error, PeakMemory(limit_bytes=MIB):
        torch.zeros(10 * MIB)
    numbers = parse_error(str(error.value))
    assert numbers["capacity"] == MIB
    assert numbers["allocated"] >= 40 * MIB


def test_another_error_is_refused():
    """The mistake: a shape that does not fit, cured with adapters."""
    with pytest.raises(ValueError, match="not an out-of-memory error"):
        parse_error("RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x3 and 4x3)")


@pytest.mark.parametrize(
    "error",
    [
        "Killed",
        "train.sh: line 3:  4711 Killed                  python train.py",
        "zsh: killed     python train.py",
        "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed.",
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=1.0",
        "Reason: OOMKilled, Exit Code: 137",
        "command terminated with exit code 137",
        "exitcode  : -9 (pid: 4711)\n  traceback : Signal 9 (SIGKILL) received by PID 4711",
        KERNEL_LOG,
    ],
)
def test_a_process_that_the_kernel_has_ended(error):
    """The mistake: the memory of the host taken for that of a GPU."""
    assert was_killed(error)
    assert parse_error(error).keys() <= {"this process"}


@pytest.mark.parametrize("error", [TORCH_1, TORCH_2_6, MPS, CPU, "KeyError: 3", "exit code 1"])
def test_an_error_of_a_device_is_not_the_kernels(error):
    """The mistake: the other way round."""
    assert not was_killed(error)
