"""Products of many rows with weights that are stored in another dtype than the product's.

Kernels for one token turn small weights into numbers on the fly, again for every few rows. A prompt
has hundreds of rows: there it is faster to convert the weights once and to run a matrix product.

    y = converted_product(x, weight)      x [M, K], weight [N, K] int8, fp16, bf16 -> [M, N]

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

# A block of weights is a megabyte in bf16. A CPU's cache holds it from conversion to product.
BLOCK_WEIGHTS = 2**19


def native_bf16_on_cpu() -> bool:
    """Whether this CPU multiplies bf16 numbers by itself."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def product_dtype(x: Tensor) -> torch.dtype:
    """In which dtype products of many rows are fastest on the device of `x`.

    On a CPU that is bf16 if it is native, and fp32 otherwise: fp16 has no fast matrix product on
    most CPUs. Elsewhere it is the dtype of `x`.
    """
    if x.device.type != "cpu":
        return x.dtype
    return torch.bfloat16 if native_bf16_on_cpu() else torch.float32


def converted_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K] times `weight` [N, K] transposed, both in `product_dtype(x)`: [M, N].

    Whole numbers up to 256 are exact in each of these dtypes.
    """
    dtype = product_dtype(x)
    rows = x.to(dtype)
    parts = [functional.linear(rows, _converted(part, dtype)) for part in _blocks(weight, dtype)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _blocks(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Rows of `weight`, few enough that their converted copy is small.

    A copy of a large weight would be fresh memory in each call, and on a CPU that takes longer than
    the product. On CUDA freed memory is kept, and one block is faster.
    """
    if weight.device.type != "cpu" or weight.dtype is dtype:
        return (weight,)
    return weight.split(max(1, BLOCK_WEIGHTS // weight.shape[1]))


def _converted(weight: Tensor, dtype: torch.dtype) -> Tensor:
    if weight.dtype is torch.float16 and weight.device.type == "cpu":
        # Straight from fp16 to bf16 a CPU converts one number at a time.
        weight = weight.float()
    return weight.to(dtype)
