"""Int8 weights in the order in which a CPU's FBGEMM reads them, and three products with them.

    dynamic       x [M, K] is rounded to 8 bits, with one scale for all rows of the call
    per_token     the same with a scale and a middle for each row
    weight_only   each row of x becomes two rows of 8 bits

A CPU with VNNI multiplies 8 bits by 8 bits several times as fast as it turns 8 bits into numbers.
So "weight_only" uses these instructions, too. A row of x becomes two rows of 8 bits each, a coarse
one and what is left of it, as a number of two digits has tens and ones:

    x  =  high + rest / 126          two rows, one product, each weight is read once

What the operator, `quantized.linear_dynamic`, demands, and what happens otherwise:

    fp32 activations
    VNNI, or one bit less for the activations     sums of two products overflow 16 bits
    activations that are not tiny                 no step is smaller than 6.1e-5
    numbers                                       what is none may come out as a finite number

The classes here see to all of that but the numbers, whose check would cost too much: they stay as
they are with "weight_only" and "per_token".

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

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


# --- the weights ----------------------------------------------------------------------------------


class PackedWeights:
    """Int8 weights [N, K] in the order in which FBGEMM reads them.

    FBGEMM rounds activations to 8 bits with one scale for the call. The kinds of products differ
    in what they hand to it, and what they make of the result.
    """

    divisor = 1.0  # of the scales: the product's own factor, which then costs no operator

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        zeros = torch.zeros(len(weight), dtype=torch.long)
        scale = scale.double() / self.divisor
        with _fbgemm(), _without_deprecation():
            quantized = torch._make_per_channel_quantized_tensor(weight, scale, zeros, 0)
            self._packed = torch.ops.quantized.linear_prepack(quantized, None)
        self._reduce_range = reduced_range()

    def whole_numbers(self) -> Tensor:
        """The int8 weight [N, K]."""
        with _fbgemm():
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
        half = ((high - low) / 2).clamp_min_(TINY)
        y = self._rounded_product(torch.cat([self._ends, (rows - middle) / half]))  # [1 + M, N]
        y = torch.addcmul(middle * self._sums, y[1:], half)  # [M, N]
        return _in_dtype_of(x, y.view(*x.shape[:-1], -1))


class TwoHalvesWeights(PackedWeights):
    """Activations in two halves of 8 bits: some 14 bits together, with a scale for each row."""

    divisor = HIGH

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        super().__init__(weight, scale)
        # As a tensor: `63 / x` of a number and a tensor is 63 times 1 / x, which is rounded twice.
        self._high = torch.tensor(float(HIGH))
        # Then a step is exactly 1, and whole numbers are not rounded again.
        self._ends = _row_with_both_ends(weight.shape[1], REST + 1.5)
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []  # rows that no call uses just now

    def product(self, x: Tensor) -> Tensor:
        """x [..., K], each row as two rows of 8 bits, in one call: [..., N].

        `high` are whole numbers up to 63. The other row is `high` plus 126 times what is left,
        which keeps it below 127. So steps = high + (other - high) / 126.
        """
        if x.numel() == x.shape[-1]:
            return self._product_of_one_row(x)
        rows = _fp32_rows(x)
        largest = torch.linalg.vector_norm(rows, math.inf, dim=1, keepdim=True)  # [M, 1]
        largest.clamp_min_(TINY)
        steps = rows * (self._high / largest)  # [M, K], from -63 to 63
        high = steps.round()
        other = torch.lerp(high, steps, REST)  # high + 126 (steps - high)
        y = self._rounded_product(torch.cat([self._ends, high, other]))  # [1 + 2M, N]
        _, y_high, y_other = y.split([1, len(rows), len(rows)])
        y = torch.lerp(y_high, y_other, 1 / REST).mul_(largest)  # [M, N]
        return _in_dtype_of(x, y.view(*x.shape[:-1], -1))

    def _product_of_one_row(self, x: Tensor) -> Tensor:
        """The same for one token, for which each operator counts: equal to the last bit.

        `largest` is a number of Python, so nothing is broadcast. The three rows are kept from call
        to call, so nothing is put together.
        """
        row = _fp32_rows(x)  # [1, K]
        largest = max(torch.linalg.vector_norm(row, math.inf).item(), TINY)
        steps = row * (HIGH / largest)
        kept = self._take_rows()
        three, high, other = kept
        torch.round(steps, out=high)
        torch.lerp(high, steps, REST, out=other)
        y = self._rounded_product(three)  # [3, N]
        self._kept.append(kept)
        y = torch.lerp(y.narrow(0, 1, 1), y.narrow(0, 2, 1), 1 / REST).mul_(largest)  # [1, N]
        return _in_dtype_of(x, y.view(*x.shape[:-1], -1))

    def _take_rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows [3, K] for this call alone, also if another thread computes, and two views of them.

        The first row is `ends`; the views are the rows for `high` and `other`, [1, K] each.
        """
        try:
            return self._kept.pop()
        except IndexError:
            # Rows that inference mode has made could not be written to outside of it.
            with torch.inference_mode(False):
                three = self._ends.repeat(3, 1)
                return three, three.narrow(0, 1, 1), three.narrow(0, 2, 1)


PACKED = {
    "weight_only": TwoHalvesWeights,
    "dynamic": DynamicWeights,
    "per_token": PerTokenWeights,
}


def packed_weights(kind: str, weight: Tensor, scale: Tensor) -> PackedWeights | None:
    """The packed weights for this kind of product, or None where another operator computes it.

    With 7 bits for an activation, half of what VNNI has, two halves of it are coarser than bf16.
    """
    if not has_packed_kernel(weight.device):
        return None
    if kind == "weight_only" and reduced_range():
        return None
    return PACKED[kind](weight, scale)


def _row_with_both_ends(width: int, end: float) -> Tensor:
    """A row [1, K] whose smallest and largest numbers decide the scale of a call."""
    ends = torch.zeros(1, width)
    ends[0, 0] = end
    ends[0, -1] = -end
    return ends


def _fp32_rows(x: Tensor) -> Tensor:
    """x [..., K] as fp32 rows [M, K]."""
    rows = x.reshape(-1, x.shape[-1])
    if rows.dtype is not torch.float32:
        rows = rows.float()
    return rows


def _in_dtype_of(x: Tensor, y: Tensor) -> Tensor:
    # A question to Python is cheaper than a call that changes nothing.
    if y.dtype is x.dtype:
        return y
    return y.to(x.dtype)


@contextlib.contextmanager
def _fbgemm() -> Iterator[None]:
    """Packing is for the engine that is set; oneDNN's and QNNPACK's are slower here."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        yield
    finally:
        torch.backends.quantized.engine = before


@contextlib.contextmanager
def _without_deprecation() -> Iterator[None]:
    """PyTorch warns that tensors with a quantized dtype will go. Here one lives for a line."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*quantized tensor creation")
        yield
