"""PyTorch's 4-bit kernels: what they take, how they pack, and whether this machine has one.

    levels uint8 [O, I], each 0 … 15   --pack-->   packed, in the layout of the device
    multiply(rows, packed, group, pairs)           rows bf16 [N, I] -> bf16 [N, O]
    unpack(packed, group, pairs)       -->         levels uint8 [O, I]

`pairs` is bf16 [G, O, 2]: the scale and the offset of every group and output. The kernel computes
(level - 8) * scale + offset.

On a CPU the layout depends on the instruction set that PyTorch found: AVX-512 packs 64 outputs
together, AVX2 32. All have the shape [O, I / 2], so nothing notices when one is read as another.
"""

from __future__ import annotations

import functools
import sys

import torch
from torch import Tensor

from recipes_lib.core.four_bit_grid import MIDDLE

# The kernels compute this many outputs together.
OUTPUTS = {"cpu": 16, "cuda": 8}
# Instruction sets for which PyTorch has a vectorized kernel. Visual C++ compiles it for none.
FAST_CPUS = ("AVX2", "AVX512", "SVE256")


def multiply(rows: Tensor, packed: Tensor, group: int, pairs: Tensor) -> Tensor:
    """Rows [N, I] times the transposed weight: [N, O]. `rows` and `pairs` are bf16."""
    if packed.is_cuda:
        return torch._weight_int4pack_mm(rows, packed, group, pairs)
    return torch._weight_int4pack_mm_for_cpu(rows, packed, group, pairs)


def pack(levels: Tensor) -> Tensor:
    """Levels uint8 [O, I] in the layout of their device."""
    if not levels.is_cuda:
        return torch._convert_weight_to_int4pack_for_cpu(levels.int(), 1)
    # Two levels in a byte, the first one in the high half: [O, I / 2].
    pairs = levels[:, ::2] << 4 | levels[:, 1::2]
    # As many tiles of 16 inputs lie together as divide the row.
    tiles = max(count for count in (2, 4, 8) if levels.shape[1] % (16 * count) == 0)
    return torch._convert_weight_to_int4pack(pairs.contiguous(), tiles)


def unpack(packed: Tensor, group: int, pairs: Tensor) -> Tensor:
    """The levels uint8 [O, I], which the kernel itself finds in any layout.

    With the scale 1 and the offset 8 each weight is its own level, and each row of the identity
    matrix picks those of one input. Whole numbers up to 15 are exact in bf16.
    """
    own = torch.empty_like(pairs)
    own[..., 0] = 1
    own[..., 1] = MIDDLE
    width = len(pairs) * group
    identity = torch.eye(width, dtype=pairs.dtype, device=pairs.device)
    by_input = multiply(identity, packed, group, own)  # [I, O]
    return by_input.T.to(torch.uint8).contiguous()


def check_kernel(device: torch.device) -> None:
    """Raise ValueError if PyTorch has no 4-bit kernel for `device`."""
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
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs native bf16, which GPUs have from compute capability 8.0 on"
    levels = torch.zeros(16, 32, dtype=torch.uint8, device=device)
    pairs = torch.ones(1, 16, 2, dtype=torch.bfloat16, device=device)
    try:
        unpack(pack(levels), 32, pairs)
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        return str(error).splitlines()[0]
    return None


def slow_kernel(device: torch.device) -> str | None:
    """Why the kernel of this device computes one number at a time; None if it does not."""
    if device.type != "cpu":
        return None
    if sys.platform == "win32":
        return "PyTorch for Windows has no vectorized 4-bit kernel"
    found = torch.backends.cpu.get_cpu_capability()
    if found not in FAST_CPUS:
        return f"PyTorch has no vectorized 4-bit kernel for this CPU ({found})"
    return None
