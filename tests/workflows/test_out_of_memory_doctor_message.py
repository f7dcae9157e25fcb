"""Messages as people have reported them, of PyTorch 1 and 2 and of what stands around it."""

from typing import NamedTuple

import pytest
import torch

from recipes_lib.core.measure import PeakMemory
from recipes_lib.workflows.out_of_memory_doctor.message import read_message

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

HIP = (
    "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 6.64 GiB. GPU 0 has a total "
    "capacity of 19.92 GiB of which 6.22 GiB is free. Of the allocated memory 5.34 GiB is "
    "allocated by PyTorch, and 7.10 GiB is reserved by PyTorch but unallocated. If reserved but "
    "unallocated memory is large try setting PYTORCH_HIP_ALLOC_CONF=expandable_segments:True"
)
XPU = (
    "RuntimeError: XPU out of memory. Tried to allocate 1.71 GiB (GPU 0; 15.56 GiB total capacity; "
    "176.00 MiB already allocated; 176.00 MiB reserved in total by PyTorch)"
)
XPU_BLOCK = (
    "RuntimeError: Current platform can NOT allocate memory block with size larger than 4GB! Tried "
    "to allocate 6.85 GiB (GPU  0; 15.56 GiB total capacity; 0 bytes already allocated; 0 bytes "
    "reserved in total by PyTorch)"
)
BUS = (
    "RuntimeError: DataLoader worker (pid 46794) is killed by signal: Bus error. It is possible "
    "that dataloader's workers are out of shared memory. Please try to raise your shared memory "
    "limit."
)
NO_SHM_FILE = (
    "RuntimeError: unable to write to file </torch_18692_1954506624>: No space left on device (28)"
)
PAGING = (
    "OSError: [WinError 1455] The paging file is too small for this operation to complete. Error "
    'loading "D:\\torch\\lib\\shm.dll" or one of its dependencies.'
)
DISPATCHED = (
    "ValueError: Some modules are dispatched on the CPU or the disk. Make sure you have enough GPU "
    "RAM to fit the quantized model."
)
TILE = (
    "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 131072, "
    "Hardware limit: 101376. Reducing block sizes or `num_stages` may help."
)
CUBLAS = "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
NUMPY = (
    "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 201. GiB for an array with shape "
    "(2999, 2999, 2999) and data type int64"
)
NCCL = "NCCL WARN Failed to CUDA calloc async 608 bytes"
BITSANDBYTES = r"Error out of memory at line 88 in file D:\a\bitsandbytes\csrc\ops.cu"
WORKER = "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed."
ELASTIC = "exitcode  : -9 (pid: 4711)\n  traceback : Signal 9 (SIGKILL) received by PID 4711"
JUPYTER = "The kernel appears to have died. It will restart automatically."
PORTABLE = (
    "torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory) "
    "Currently allocated     : 6.93 GiB Requested               : 32.00 MiB"
)
OFFLOADED = (
    "ValueError: The current `device_map` had weights offloaded to the disk. Please provide an "
    "`offload_folder` for them."
)
ONE_DNN = "RuntimeError: could not create a primitive: out of memory"
OOM_KILLER = "Out of memory: Kill process 4711 (python) score 900 or sacrifice child"
NO_NUMBERS = "RuntimeError: CUDA error: out of memory"


class Form(NamedTuple):
    """A text, the place that is full, words of the first advice, and fields in GiB."""

    error: str
    place: str
    first: str
    fields: dict[str, float | None]


ROOM = "set_per_process_memory_fraction"
RECIPE = "micro-batches"  # the first of all recipes: there is no better advice
FORMS = [
    # Of torch 1: what is reserved but unallocated is not said, it is a difference.
    Form(
        TORCH_1,
        "CUDA",
        "PYTORCH_ALLOC_CONF",
        {"asked": 2.93, "limit": 23.8, "allocated": 12.04, "free": 2.82, "unallocated": 7.65},
    ),
    # 0.77 GiB are not accounted for: our own CUDA context, not another process.
    Form(
        TORCH_2_0,
        "CUDA",
        "memory in one piece",
        {"asked": 1.7, "limit": 6, "free": 0, "allocated": 2.93, "unallocated": 2.3, "others": 0},
    ),
    Form(TORCH_2_6, "CUDA", "nvidia-smi", {"asked": 0.139, "limit": 3.15, "others": 44.12}),
    # The private pools stand between "allocated" and "unallocated".
    Form(
        GRAPHS_AND_CAP,
        "CUDA",
        RECIPE,
        {"asked": 1.5, "limit": 20, "allocated": 19, "unallocated": 0.234, "others": 0},
    ),
    Form(HIP, "ROCm", "PYTORCH_HIP_ALLOC_CONF", {"asked": 6.64, "limit": 19.92, "free": 6.22}),
    Form(MPS, "MPS", RECIPE, {"asked": 1, "limit": 18.13, "allocated": 17.5}),
    Form("RuntimeError: Invalid buffer size: 19.45 GB", "MPS", "smaller", {"asked": 19.45}),
    Form(XPU, "XPU", RECIPE, {"asked": 1.71, "limit": 15.56, "unallocated": 0}),
    Form(XPU_BLOCK, "XPU", "no tensor above 4 GiB", {"asked": 6.85, "limit": 15.56}),
    Form(CPU, "host", RECIPE, {"asked": 116813856768 / GIB}),
    Form(NUMPY, "host", "read in parts", {"asked": 201}),
    Form("MemoryError", "host", RECIPE, {"asked": None}),
    Form(BUS, "shared memory", "--shm-size", {}),
    Form(NO_SHM_FILE, "shared memory", "--shm-size", {}),
    Form(PAGING, "paging file", "larger paging file", {}),
    Form(DISPATCHED, "loading", "device_map", {}),
    Form(TILE, "one block of a GPU", "smaller blocks", {"asked": 131072 / GIB}),
    Form(CUBLAS, "CUDA", ROOM, {"asked": None}),
    Form(NCCL, "CUDA", ROOM, {}),
    Form(BITSANDBYTES, "CUDA", ROOM, {}),
    Form(NO_NUMBERS, "CUDA", "nvidia-smi", {"asked": None}),
    Form("HIP error: out of memory", "ROCm", "rocm-smi", {}),
    Form("CUDA out of memory", "CUDA", RECIPE, {"asked": None}),
    Form(PORTABLE, "CUDA", RECIPE, {}),  # "MemoryError" is a part of its name
    Form(ONE_DNN, "host", RECIPE, {}),
    Form(OFFLOADED, "loading", "device_map", {}),
    Form("Bus error (core dumped)", "shared memory", "--shm-size", {}),
    Form(OOM_KILLER, "host", "dmesg", {}),
    Form("make: *** [train] Error 137", "host", "dmesg", {}),
    Form("nbclient.exceptions.DeadKernelError: Kernel died", "host", "dmesg", {}),
    Form(KERNEL_LOG, "host", "dmesg", {"resident": 23.1}),
    Form("Killed", "host", "dmesg", {}),
    Form("command terminated with exit code 137", "host", "dmesg", {}),
    Form(WORKER, "host", "dmesg", {}),
    Form(ELASTIC, "host", "dmesg", {}),
    Form(JUPYTER, "host", "dmesg", {}),
]


def test_reads_the_emulated_error():
    """The words of core.measure, which could change without those here."""
    with pytest.raises(torch.OutOfMemoryError) as error, PeakMemory(limit_bytes=MIB):
        torch.zeros(10 * MIB)
    found = read_message(str(error.value))
    assert found.limit == MIB
    assert found.allocated >= 40 * MIB


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x3 and 4x3)",
        "KeyError: 3",
        "exit code 1",
        "RuntimeError: DataLoader worker (pid 29) is killed by signal: Segmentation fault.",
        "OSError: [Errno 28] No space left on device",
    ],
)
def test_what_is_not_known_is_quoted_with_the_questions_that_decide(error):
    """The mistake: a shape that does not fit, cured with adapters."""
    with pytest.raises(ValueError, match="Three questions decide") as refused:
        read_message(error)
    assert error in str(refused.value)
    assert str(refused.value).count("?") == 3
