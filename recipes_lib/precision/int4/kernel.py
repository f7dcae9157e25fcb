"""PyTorch's 4-bit kernels: what they take, how they pack, and whether this machine has one.

    levels uint8 [O, I], each 0 … 15   --pack-->   packed, in the layout of the device
    multiply(rows, packed, group, pairs)           rows bf16 [N, I] -> bf16 [N, O]
    unpack(packed, group, pairs)       -->         levels uint8 [O, I]

`pairs` is bf16 [G, O, 2]: the scale and the offset of every group and output. The kernel computes
(level - 8) * scale + offset.

On a CPU the layout depends on the instruction set that PyTorch found: AVX-512 packs 64 outputs
together, AVX2 32. All have the shape [O, I / 2], so nothing notices when one is read as another.

The kernel of CUDA computes in bf16, which GPUs have from compute capability 8.0 on. On older ones,
such as a T4, two levels lie in each byte, and weights become numbers before each product.
"""

from __future__ import annotations

import functools
import sys

import torch
from torch import Tensor
from torch.nn import functional

from recipes_lib.precision._four_bit_grid import MIDDLE

# The kernels compute this many outputs together.
OUTPUTS = {"cpu": 16, "cuda": 8}
# Instruction sets for which PyTorch has a vectorized kernel. Visual C++ compiles it for none.
FAST_CPUS = ("AVX2", "AVX512", "SVE256")


def multiply(rows: Tensor, packed: Tensor, group: int, pairs: Tensor) -> Tensor:
    """Rows [N, I] in their `rows_dtype` times the transposed weight: [N, O]. `pairs` are bf16."""
    if in_bytes(packed):
        return functional.linear(rows, _numbers(packed, pairs.to(rows.dtype)))
    if packed.is_cuda:
        return torch._weight_int4pack_mm(rows, packed, group, pairs)
    return torch._weight_int4pack_mm_for_cpu(rows, packed, group, pairs)


def pack(levels: Tensor) -> Tensor:
    """Levels uint8 [O, I] in the layout of their device."""
    # Two levels in a byte, the first one in the high half: [O, I / 2].
    pairs = levels[:, ::2] << 4 | levels[:, 1::2]
    if not has_kernel(levels.device):
        return pairs
    if not levels.is_cuda:
        return torch._convert_weight_to_int4pack_for_cpu(levels.int(), 1)
    # As many tiles of 16 inputs lie together as divide the row.
    tiles = max(count for count in (2, 4, 8) if levels.shape[1] % (16 * count) == 0)
    return torch._convert_weight_to_int4pack(pairs.contiguous(), tiles)


def unpack(packed: Tensor, group: int, pairs: Tensor) -> Tensor:
    """The levels uint8 [O, I], which the kernel itself finds in any layout of its own.

    With the scale 1 and the offset 8 each weight is its own level, and each row of the identity
    matrix picks those of one input. Whole numbers up to 15 are exact in bf16.
    """
    if in_bytes(packed):
        return _levels_of_bytes(packed)
    own = torch.empty_like(pairs)
    own[..., 0] = 1
    own[..., 1] = MIDDLE
    width = len(pairs) * group
    identity = torch.eye(width, dtype=pairs.dtype, device=pairs.device)
    by_input = multiply(identity, packed, group, own)  # [I, O]
    return by_input.T.to(torch.uint8).contiguous()


def has_kernel(device: torch.device) -> bool:
    """Whether PyTorch multiplies with levels on `device`, or with numbers made of them before."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def in_bytes(packed: Tensor) -> bool:
    """Whether `packed` is of a GPU without a kernel; the kernel of CUDA reads int32."""
    return packed.is_cuda and packed.dtype == torch.uint8


def rows_dtype(packed: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which `multiply` takes rows that come in `dtype`."""
    if not in_bytes(packed):
        return torch.bfloat16
    if dtype == torch.bfloat16:  # these GPUs emulate it
        return torch.float32
    return dtype


def _levels_of_bytes(packed: Tensor) -> Tensor:
    """The levels uint8 [O, I] of a device without a kernel, two of which are in each byte."""
    return torch.stack([packed >> 4, packed & 15], dim=-1).flatten(1)


def _numbers(packed: Tensor, pairs: Tensor) -> Tensor:
    """The weight [O, I] on a device without a kernel, in the dtype of `pairs` [G, O, 2]."""
    scales, offsets = pairs.unbind(-1)  # [G, O]
    levels = _levels_of_bytes(packed)  # [O, I]
    in_groups = levels.view(*scales.T.shape, -1).to(pairs.dtype)  # [O, G, group]
    # In place: a second copy of an output layer would be a gigabyte.
    in_groups.sub_(MIDDLE).mul_(scales.T[..., None]).add_(offsets.T[..., None])
    return in_groups.view_as(levels)


def check_kernel(device: torch.device) -> None:
    """Raise ValueError if 4-bit weights cannot be multiplied on `device`."""
    problem = _why_no_kernel(device)
    if problem:
        raise ValueError(
            f"no 4-bit kernel on {device}: {problem}. 8 bits (recipes_lib.precision.int8) or bf16 "
            f"run on more machines"
        )


@functools.cache
def _why_no_kernel(device: torch.device) -> str | None:
    """What this device lacks: a small product tells, since an operator may be declared only."""
    if device.type not in OUTPUTS:
        return "give a model on a CPU or a CUDA device"
    levels = torch.zeros(16, 32, dtype=torch.uint8, device=device)
    pairs = torch.ones(1, 16, 2, dtype=torch.bfloat16, device=device)
    try:
        unpack(pack(levels), 32, pairs)
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        return str(error).splitlines()[0]
    return None


def slow_kernel(device: torch.device) -> str | None:
    """What makes products with 4-bit weights slow on this device; None if nothing does."""
    if not has_kernel(device):
        return (
            "PyTorch has no 4-bit kernel for GPUs below compute capability 8.0, and weights become "
            "numbers before each product"
        )
    if device.type != "cpu":
        return None
    if sys.platform == "win32":
        return "PyTorch for Windows has no vectorized 4-bit kernel"
    found = torch.backends.cpu.get_cpu_capability()
    if found not in FAST_CPUS:
        return f"PyTorch has no vectorized 4-bit kernel for this CPU ({found})"
    return None
