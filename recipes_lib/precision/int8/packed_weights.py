"""The products of int8 layers, with packed weights or plain ones, and what their operators demand.

On a CPU with FBGEMM, the weights lie in the order in which it reads them (packed):

    dynamic       x [M, K] is rounded to 8 bits, with one scale for all rows of the call
    per_token     the same with a scale and a middle for each row
    weight_only   each row becomes two rows of 8 bits, x = high + rest / 126, in one product: VNNI
                  multiplies 8 bits by 8 bits several times as fast as it makes numbers of them

What is left has a product of a plain tensor of weights, for all kinds alike, and activations stay
in their dtype: a CUDA device, a CPU without FBGEMM, and "weight_only" on a CPU without VNNI. On
CUDA it converts the weights first, and is slower than bf16; `torch.compile` can make the conversion
a part of the product.

What an operator demands, and what happens otherwise:

    `quantized.linear_dynamic`  fp32 activations
                                VNNI, or one bit less for the activations: else sums of two products
                                overflow 16 bits
                                activations that are not tiny: no step is smaller than 6.1e-5
                                numbers: what is none may come out as a finite number
    `_weight_int8pack_mm`       bf16 activations and scales: with fp32 or fp16 it takes several
                                times as long, and says nothing
                                K a multiple of 16: it reads 16 weights at a time, also those that
                                belong to the next row

This file sees to all of that but the numbers, whose check would cost too much with "dynamic": they
stay what they are with "weight_only" and "per_token".

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from recipes_lib.precision._converted_weights import converted_product, product_dtype

TINY = 1e-30  # what a row of zeros is divided by

LIFT = 2.0**12  # activations for FBGEMM are multiplied by it
HIGH = 63  # steps of the coarse half of an activation, up and down from zero
REST = 2 * HIGH  # steps of the other half, for each coarse one
_linear_dynamic = torch.ops.quantized.linear_dynamic.default

# --- what this machine has ------------------------------------------------------------------------


def has_packed_kernel(device: torch.device) -> bool:
    """Whether `quantized.linear_dynamic` computes here: on CPUs for which PyTorch has FBGEMM."""
    return device.type == "cpu" and "fbgemm" in torch.backends.quantized.supported_engines


def reduced_range() -> bool:
    """Whether activations have to do with 7 bits.

    Without VNNI, two products of 8 bits are added in 16, and what does not fit is cut off.
    """
    return not torch.cpu._is_vnni_supported()


# --- packed weights -------------------------------------------------------------------------------


class PackedWeights:
    """Int8 weights [N, K] in the order in which FBGEMM reads them."""

    divisor = 1.0  # of the scales: the product's own factor, which then costs no operator

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        """Pack int8 `weight` [N, K] with its `scale` for FBGEMM."""
        zeros = torch.zeros(len(weight), dtype=torch.long)
        scale = scale.double() / self.divisor
        with _packing_for_fbgemm(), warnings.catch_warnings():
            # That such tensors will go. Here one lives for a line.
            warnings.filterwarnings("ignore", message=".*quantized tensor creation")
            quantized = torch._make_per_channel_quantized_tensor(weight, scale, zeros, 0)
            self._packed = torch.ops.quantized.linear_prepack(quantized, None)
        self._reduce_range = reduced_range()

    def whole_numbers(self) -> Tensor:
        with _packing_for_fbgemm():
            weight, _ = torch.ops.quantized.linear_unpack(self._packed)
        return weight.int_repr()

    def product(self, x: Tensor) -> Tensor:
        """x [..., K] in any floating dtype: [..., N], in the same."""
        raise NotImplementedError

    def _rounded_product(self, rows: Tensor) -> Tensor:
        return _linear_dynamic(rows, self._packed, self._reduce_range)


class DynamicWeights(PackedWeights):
    """Activations in 8 bits, with one scale for the whole call."""

    # The scale of the activations cannot be smaller than 6.1e-5. Larger activations, and smaller
    # weights instead: powers of two round nothing.
    divisor = LIFT

    def product(self, x: Tensor) -> Tensor:
        """x [..., K], from its smallest number to its largest in 256 steps: [..., N]."""
        if x.dim() == 1:  # FBGEMM wants rows
            return self.product(x[None])[0]
        return _in_dtype_of(x, self._rounded_product(x.float() * LIFT))


class PerTokenWeights(PackedWeights):
    """Activations in 8 bits, with a scale and a middle for each row."""

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        super().__init__(weight, scale)
        self._ends = _row_with_both_ends(weight.shape[1], 1.0)
        self._sums = weight.sum(dim=1, dtype=torch.int32) * scale.float()  # [N], of each row of W

    def product(self, x: Tensor) -> Tensor:
        """x [..., K], each row rounded by itself, in one call: [..., N].

        The numbers of a row need not lie around zero. So its middle is taken away, what is left is
        divided by its largest number, and the product gets the middle back: W m = m sum(W). One
        more row holds 1 and -1, so that the scale of the call is the same for any rows, and no row
        depends on the others.
        """
        rows = x.float().reshape(-1, x.shape[-1])  # [M, K]
        low, high = rows.aminmax(dim=1, keepdim=True)  # [M, 1]
        middle = (low + high) / 2
        # Not (high - low) / 2: the middle is rounded, and a row beyond 1 would decide the scale.
        half = torch.maximum(high - middle, middle - low).clamp_min_(TINY)
        y = self._rounded_product(torch.cat([self._ends, (rows - middle) / half]))  # [1 + M, N]
        # Two operators: `addcmul` rounds once or twice, depending on how many rows there are.
        y = y[1:].mul_(half).add_(middle * self._sums)  # [M, N]
        return _in_dtype_of(x, y.view(*x.shape[:-1], -1))


class TwoHalvesWeights(PackedWeights):
    """Activations in two halves of 8 bits: some 14 bits together, with a scale for each row."""

    divisor = HIGH

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        super().__init__(weight, scale)
        # Then a step is exactly 1, and whole numbers are not rounded again.
        self._ends = _row_with_both_ends(weight.shape[1], REST + 1.5)

    def product(self, x: Tensor) -> Tensor:
        """x [..., K], each row as two rows of 8 bits, in one call: [..., N].

        `high` are whole numbers up to 63. The other row is `high` plus 126 times what is left,
        which keeps it below 127. So steps = high + (other - high) / 126.
        """
        rows = x.reshape(-1, x.shape[-1]).float()  # [M, K]
        largest = torch.linalg.vector_norm(rows, math.inf, dim=1, keepdim=True)  # [M, 1]
        largest.clamp_min_(TINY)
        steps = rows * (HIGH / largest)  # [M, K], from -63 to 63
        high = steps.round()
        other = torch.lerp(high, steps, REST)  # high + 126 (steps - high)
        y = self._rounded_product(torch.cat([self._ends, high, other]))  # [1 + 2M, N]
        _, y_high, y_other = y.split([1, len(rows), len(rows)])
        y = torch.lerp(y_high, y_other, 1 / REST).mul_(largest)  # [M, N]
        return _in_dtype_of(x, y.view(*x.shape[:-1], -1))


PACKED = {
    "weight_only": TwoHalvesWeights,
    "dynamic": DynamicWeights,
    "per_token": PerTokenWeights,
}


def weights_for_kernel(kind: str, weight: Tensor, scale: Tensor) -> PackedWeights | None:
    """The packed weights for this kind of product, or None where another operator computes it.

    With 7 bits for an activation, half of what VNNI has, two halves of it are coarser than bf16.
    """
    if not has_packed_kernel(weight.device):
        return None
    if kind == "weight_only" and reduced_range():
        return None
    return PACKED[kind](weight, scale)


def _row_with_both_ends(width: int, end: float) -> Tensor:
    """Beside packed weights: a row [1, K] whose ends decide the scale of a call."""
    ends = torch.zeros(1, width)
    ends[0, 0] = end
    ends[0, -1] = -end
    return ends


def _in_dtype_of(x: Tensor, y: Tensor) -> Tensor:
    # A question to Python is cheaper than a call that changes nothing.
    if y.dtype is x.dtype:
        return y
    return y.to(x.dtype)


@contextlib.contextmanager
def _packing_for_fbgemm() -> Iterator[None]:
    """Packing is for the engine that is set; oneDNN's and QNNPACK's are slower here."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        yield
    finally:
        torch.backends.quantized.engine = before


# --- a plain tensor of weights --------------------------------------------------------------------

# From this many rows on, a matrix product of converted weights is faster than the kernel for few.
GEMM_FROM_ROWS = 16
# The kernel reads 16 numbers at a time, from addresses that are multiples of 32 bytes.
KERNEL_STEP = 16
KERNEL_ALIGNMENT = 32


def plain_product(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x [M, K] times int8 `weight` [N, K] with a bf16 `scale` [N] per row: [M, N], as x's dtype."""
    few = len(x) < GEMM_FROM_ROWS and weight.shape[1] % KERNEL_STEP == 0
    if x.device.type == "cpu" and few:
        # With any other dtype the operator is right, and several times as slow.
        rows = x.to(torch.bfloat16)
        return torch.ops.aten._weight_int8pack_mm(_aligned_rows(rows), weight, scale).to(x.dtype)
    # Whole numbers up to 127 are exact in 16 bits, and the scales come after the sum: the weights
    # are not rounded a second time. fp16 ends at 65,504, which such a sum passes.
    rows = x.float() if product_dtype(x) is torch.float16 else x
    y = converted_product(rows, weight)  # [M, N]
    return (y * scale.to(y.dtype)).to(x.dtype)


def _aligned_rows(rows: Tensor) -> Tensor:
    """`rows` in one piece that begins where the kernel can read it."""
    rows = rows.contiguous()
    if rows.data_ptr() % KERNEL_ALIGNMENT:
        return rows.clone()
    return rows
