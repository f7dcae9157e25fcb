"""What am I running on?

`machine()` answers once per process: device, memory, native bf16, versions, and the *tier* from
which every notebook takes its sizes. On a GPU it also lets the allocator's segments grow. Set
`RECIPES_TIER=cpu` to run a GPU machine as a CPU one, and `RECIPES_FAST=1` for the small sizes that
CI uses.

| tier    | stands for                        | precision to compute in |
|---------|-----------------------------------|-------------------------|
| `cpu`   | a laptop or a server without GPU  | bf16 if native, or fp32 |
| `gpu16` | T4, V100, RTX 4080: under 20 GiB  | fp16 on a T4, else bf16 |
| `gpu24` | L4, A10G, RTX 4090: under 60 GiB  | bf16                    |
| `gpu80` | A100, H100, H200                  | bf16                    |
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import platform
import random
import subprocess
import warnings
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch

from recipes_lib.core.checks import check_choice

# Whoever imports them (transformers and peft do), these warn of kernels for other machines that
# nothing here uses.
for _name in ("bitsandbytes", "torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)

TIERS = ("cpu", "gpu16", "gpu24", "gpu80")
GIB = 2**30
SMALLEST_GPU = 14 * GIB  # a T4 has 14.6: the notebooks' sizes for GPUs need that
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
ALLOCATOR_VARIABLES = {
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
}


@dataclass(frozen=True)
class Machine:
    """The facts that decide sizes and precision. `memory_bytes` is all that the device has."""

    device: str
    name: str
    memory_bytes: int
    native_bf16: bool
    cores: int
    tier: str
    versions: dict[str, str]

    @property
    def compute_dtype(self) -> torch.dtype:
        """The fastest dtype for matrix products here: bf16, fp16 (T4), or fp32 (a CPU without
        bf16).
        """
        if self.native_bf16:
            return torch.bfloat16
        return torch.float16 if self.device == "cuda" else torch.float32

    def __str__(self) -> str:
        facts = [
            self.name,
            f"{self.memory_bytes / GIB:.0f} GiB",
            f"{self.cores} CPU cores",
            "native bf16" if self.native_bf16 else "no native bf16",
            f"tier {self.tier}",
        ]
        if fast():
            facts.append("FAST sizes")
        versions = [f"{name} {version}" for name, version in self.versions.items()]
        return f"{' · '.join(facts)}\n{' · '.join(versions)}"


@functools.lru_cache(maxsize=1)
def machine() -> Machine:
    """Describe this machine once. Raises ValueError for a RECIPES_TIER that does not exist here."""
    wanted = os.environ.get("RECIPES_TIER", "")
    if wanted:
        check_choice(TIERS, RECIPES_TIER=wanted)
    if wanted != "cpu" and torch.cuda.is_available():
        return _gpu_machine(wanted)
    if wanted in ("", "cpu"):
        if not wanted and NVIDIA_DRIVER.exists():
            _warn_of_unseen_gpu()
        return _cpu_machine()
    raise ValueError(
        f"RECIPES_TIER={wanted!r} needs a CUDA device and torch sees none; use RECIPES_TIER=cpu"
    )


def _warn_of_unseen_gpu() -> None:
    """A notebook that silently takes the CPU is slow, and its reader does not know why."""
    build = torch.version.cuda
    reason = "this PyTorch is built for CPUs"
    if build is not None:
        reason = f"this PyTorch is built for CUDA {build}, which the driver may be too old for"
    warnings.warn(
        f"this machine has an NVIDIA driver, and torch {torch.__version__} sees no GPU: {reason}. "
        f"All runs on the CPU. Install a PyTorch for this driver (pytorch.org/get-started), or set "
        f"RECIPES_TIER=cpu to take the CPU without this warning",
        stacklevel=3,
    )


def _let_segments_grow() -> None:
    """Ask the allocator of this machine's GPU for segments that grow, unless the user has.

    Recipes make tensors of many sizes, each a large part of the card. In segments of fixed size
    the gaps between them are lost: a limit of 20 GiB then ends at 16 to 18.
    """
    if ALLOCATOR_VARIABLES & os.environ.keys():
        return
    settings = "expandable_segments:True"
    if hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        torch._C._accelerator_setAllocatorSettings(settings)
    else:  # an older PyTorch
        torch.cuda.memory._set_allocator_settings(settings)


def _gpu_machine(tier: str) -> Machine:
    """The first CUDA device, as of the tier named, or of the one that its memory suggests."""
    _let_segments_grow()
    properties = torch.cuda.get_device_properties(0)
    return Machine(
        device="cuda",
        name=properties.name,
        memory_bytes=properties.total_memory,
        # Asking torch.cuda.is_bf16_supported() says yes on a T4, where bf16 is emulated and slow.
        native_bf16=properties.major >= 8,
        cores=_cpu_cores(),
        tier=tier or _tier_of(properties.total_memory),
        versions=_versions() | _gpu_versions(),
    )


def _tier_of(memory_bytes: int) -> str:
    if memory_bytes < 20 * GIB:
        return "gpu16"
    if memory_bytes < 60 * GIB:
        return "gpu24"
    return "gpu80"


def _cpu_machine() -> Machine:
    avx512_bf16 = torch.cpu._is_avx512_bf16_supported()
    amx = torch.cpu._is_amx_tile_supported()
    return Machine(
        device="cpu",
        name=_cpu_name(),
        memory_bytes=psutil.virtual_memory().total,
        native_bf16=avx512_bf16 or amx,
        cores=_cpu_cores(),
        tier="cpu",
        versions=_versions(),
    )


def fast() -> bool:
    """True under `RECIPES_FAST=1`: the small sizes that CI uses."""
    return os.environ.get("RECIPES_FAST", "0") not in ("", "0")


class Sizes(SimpleNamespace):
    """The sizes of a notebook as attributes; `tier` says for which kind of machine."""

    def __str__(self) -> str:
        width = max(map(len, vars(self)))
        lines = []
        for name, value in vars(self).items():
            number = f"{value:,}" if type(value) is int else str(value)
            lines.append(f"{name:<{width}}  {number}")
        return "\n".join(lines)

    __repr__ = __str__


def choose_sizes(
    *,
    fast: dict[str, Any],
    cpu: dict[str, Any],
    gpu16: dict[str, Any],
    gpu24: dict[str, Any],
    gpu80: dict[str, Any],
) -> Sizes:
    """The sizes for this machine, as attributes: one of a notebook's dicts, by FAST and the tier.

        sizes = choose_sizes(fast=dict(batch=2), cpu=dict(batch=8), gpu16=dict(batch=16), …)
        sizes.batch

    Raises ValueError if the dicts name different sizes, since a notebook would fail on one tier
    only, and for a GPU that is smaller than those which the sizes are for.
    """
    choices = {"fast": fast, "cpu": cpu, "gpu16": gpu16, "gpu24": gpu24, "gpu80": gpu80}
    for tier, sizes in choices.items():
        if set(sizes) != set(cpu):
            differing = set(cpu) ^ set(sizes)
            raise ValueError(f"{tier} and cpu do not both have {differing}: name the same sizes")
    tier = _tier_of_sizes()
    return Sizes(tier=tier, **choices[tier])


def _tier_of_sizes() -> str:
    """The tier whose sizes this machine gets; ValueError for a GPU that is too small."""
    if fast():
        return "fast"
    here = machine()
    too_small = here.device == "cuda" and here.memory_bytes < SMALLEST_GPU
    # Who names a tier wants to try it all the same.
    if too_small and not os.environ.get("RECIPES_TIER"):
        raise ValueError(
            f"{here.name} has {here.memory_bytes / GIB:.1f} GiB, and the sizes for GPUs need "
            f"{SMALLEST_GPU / GIB:.0f}: set RECIPES_TIER=cpu before Python starts for the sizes "
            f"that run on a CPU, or RECIPES_TIER=gpu16 to try those of a T4 all the same"
        )
    return here.tier


def seed_everything(seed: int = 0) -> None:
    """Seed Python and torch (every device): a rerun on one machine gives the same losses."""
    random.seed(seed)
    torch.manual_seed(seed)


def synchronize() -> None:
    """Wait for the device, so that a clock read next tells the truth. Does nothing on a CPU."""
    if machine().device == "cuda":
        torch.cuda.synchronize()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("transformers", "peft", "bitsandbytes"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _gpu_versions() -> dict[str, str]:
    """Of the driver and of cuDNN, as far as they can be asked: both decide which kernels run."""
    found = {}
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5)
        found["driver"] = answer.stdout.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        pass  # a container may come without the tool, and a driver in trouble may not answer
    try:
        cudnn = torch.backends.cudnn.version()
    except RuntimeError:
        # Another cuDNN than PyTorch's own is in the path. What uses it says so; this only reports.
        cudnn = "incompatible"
    if cudnn is not None:
        found["cudnn"] = str(cudnn)
    return found


def _cpu_cores() -> int:
    # A container often owns fewer cores than the host shows; macOS and Windows cannot tell.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def require(package: str) -> Any:
    """Import an optional package, or raise ImportError with the command that installs it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f"this recipe needs {package}: run `pip install {package}`") from error
