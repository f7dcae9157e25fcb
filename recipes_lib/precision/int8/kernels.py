"""The products of int8 layers that read a plain tensor of weights, and what silently slows them.

    weight_only   x [M, K] in 16 bits, Q [N, K] in 8:   y = (x Q^T) scale
    integer       x is rounded to 8 bits as well, with a scale for each row: whole numbers only

On a CPU with FBGEMM, `int8_packed` is faster in most cases. These are what is left: a CUDA device,
a CPU without FBGEMM, and "weight_only" on a CPU without VNNI.

What an operator demands, and what happens otherwise:

    `_weight_int8pack_mm`       bf16 activations and scales: with fp32 or fp16 it takes several
                                times as long, and says nothing
                                K a multiple of 16: it reads 16 weights at a time, also those that
                                belong to the next row
    `_int_mm` on CUDA           more than 16 rows; K and N multiples of 8

The functions here see to all of that. On CUDA, eager weight-only products convert the weights
first, and are slower than bf16; `torch.compile` can make the conversion a part of the product.

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from recipes_lib.precision._converted_weights import converted_product, product_dtype

# From this many rows on, a matrix product of converted weights is faster than the kernel for few.
GEMM_FROM_ROWS = 16
# The kernel reads 16 numbers at a time, from addresses that are multiples of 32 bytes.
KERNEL_STEP = 16
KERNEL_ALIGNMENT = 32
# cuBLAS multiplies int8 matrices of at least 17 rows, and with widths that are multiples of 8.
CUDA_LEAST_ROWS = 17
CUDA_STEP = 8
TINY = 1e-30  # what a row of zeros is divided by

# --- weight-only ----------------------------------------------------------------------------------


def weight_only_product(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x [M, K] times int8 `weight` [N, K] with a bf16 `scale` [N] per row: [M, N], as x's dtype."""
    if x.device.type == "cpu" and few_rows_kernel_fits(x, weight):
        # With any other dtype the operator is right, and several times as slow.
        rows = x.to(torch.bfloat16)
        return torch.ops.aten._weight_int8pack_mm(_aligned(rows), weight, scale).to(x.dtype)
    if product_dtype(x) == torch.float16:
        return fp16_product(x, weight, scale)
    # Whole numbers up to 127 are exact in 16 bits, and the scales come after the sum: the weights
    # are not rounded a second time.
    y = converted_product(x, weight)  # [M, N]
    return (y * scale.to(y.dtype)).to(x.dtype)


def fp16_product(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """The same in fp16, which ends at 65,504: sums of whole numbers would be infinite.

    128ths of whole numbers are as exact. A sum of them is about as large as the result.
    """
    fractions = weight.to(x.dtype).mul_(1 / 128)  # [N, K]
    return functional.linear(x, fractions) * (scale.float() * 128).to(x.dtype)  # [M, N]


def few_rows_kernel_fits(x: Tensor, weight: Tensor) -> bool:
    """Whether the CPU kernel for few rows is right for this width, and fast for this many rows."""
    return len(x) < GEMM_FROM_ROWS and weight.shape[1] % KERNEL_STEP == 0


def _aligned(rows: Tensor) -> Tensor:
    """`rows` in one piece that begins where the kernel can read it."""
    rows = rows.contiguous()
    if rows.data_ptr() % KERNEL_ALIGNMENT:
        return rows.clone()
    return rows


# --- 8 bits times 8 bits --------------------------------------------------------------------------


def integer_product(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x [M, K] with a scale per row, times int8 `weight`, in whole numbers: [M, N], on any device.

    Rows and columns of zeros are added where cuBLAS wants more of them.
    """
    largest = x.float().abs().amax(dim=1, keepdim=True).clamp_min(TINY)  # [M, 1]
    rounded = (x.float() * (127 / largest)).round().to(torch.int8)  # [M, K]
    sums = whole_number_product(rounded, weight)  # [M, N]
    return (sums * (largest / 127) * scale.float()).to(x.dtype)


def whole_number_product(a: Tensor, b: Tensor) -> Tensor:
    """int8 a [M, K] times b [N, K] transposed: int32 [M, N]."""
    rows, outputs = len(a), len(b)
    if a.device.type == "cuda":
        width = _up_to_multiple(a.shape[1])
        a = _padded(a, max(rows, CUDA_LEAST_ROWS), width)
        b = _padded(b, _up_to_multiple(outputs), width)
    return torch._int_mm(a, b.t())[:rows, :outputs]


def _padded(matrix: Tensor, rows: int, columns: int) -> Tensor:
    more_rows = rows - matrix.shape[0]
    more_columns = columns - matrix.shape[1]
    if more_rows == 0 and more_columns == 0:
        return matrix  # `pad` would copy it: all weights, for each token
    return functional.pad(matrix, (0, more_columns, 0, more_rows))


def _up_to_multiple(size: int) -> int:
    return -(-size // CUDA_STEP) * CUDA_STEP
