"""What losses have in common whose logits exist for one chunk of tokens at a time.

The logits [T, V] and their gradients are the largest tensors of a step. A loss is a scalar, so the
gradient of the logits is known as soon as they are, up to a factor that backward brings. No table
of all logits is needed:

    forward    rows that have a target              `rows_with_a_target`
               for each chunk of C of these rows    `ChunkPlan`
                   logits [C, V]                    `LayerProducts`
                   become their own gradient        each technique has its own loss
                   which goes into three sums       `LayerGradients`
    backward   gives the sums away, times the factor that came     `LossWithGradients`

Between the products a chunk is worked on in fp32. That is done in blocks of a few rows, so that
only a block has an fp32 copy.

Shapes: T tokens, N of them with a target, D hidden, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from recipes_lib.core.measure import dry
from recipes_lib.core.measure.dry_run import pretends_a_card
from recipes_lib.core.measure.dry_values import values_of
from recipes_lib.core.measure.machine import machine
from recipes_lib.core.model.output_layer import OutputLayer
from recipes_lib.core.model.second_derivatives import first_derivatives_only

# Kernels count the elements of a tensor in 32 bits.
MOST_ELEMENTS = 2**31 - 1

# Under autocast a product of 16 bits begins with a copy of the weight. For so few rows a CPU
# multiplies in fp32 in about the time that the copy takes.
FEW_TARGETS = 128

# Each addition in bf16 rounds. A sum of this many chunks is off by 0.5 %; in fp32 it is off by
# 0.25 %, because the bf16 products in it are rounded anyway.
MOST_CHUNKS_SUMMED_IN_BF16 = 16

# --- which tokens count ---------------------------------------------------------------------------


def rows_with_a_target(labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Which of T tokens in a chunked loss have a target: [N]; in a dry run without values, all."""
    rows = torch.arange(labels.numel(), device=labels.device)  # [T]
    if dry() and values_of(labels) is None:
        return rows
    return rows[labels.flatten() != ignore_index]


def divisor_of_mean(targets: int, num_items: int | torch.Tensor | None) -> torch.Tensor:
    """What the sum over chunks is divided by, a scalar: `num_items`, or the number of targets.

    A micro-batch is given the `num_items` of its whole batch: means over its own targets would give
    each micro-batch the same weight, however many targets it has. Raises ValueError for a mean over
    no target.
    """
    divisor = targets if num_items is None else num_items
    divisor = torch.as_tensor(divisor).reshape(())
    if divisor <= 0:
        raise ValueError(
            f"a mean over {divisor} targets: "
            f"give labels other than the ignored one, or num_items above 0"
        )
    return divisor


# --- the plan of the chunks -----------------------------------------------------------------------


@dataclass(frozen=True)
class ChunkPlan:
    """How many rows of logits exist at a time, and the dtypes to compute in."""

    rows: int  # C
    block_rows: int  # of a chunk that are worked on at a time between its products
    products: torch.dtype  # of the logits and of all matrix products
    sums: torch.dtype  # of the loss, and of everything between the products
    weight_sums: torch.dtype  # of the gradient of the weight, while chunks are added to it


def plan_chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    targets: int,
    chunk_size: int | None,
    chunk_bytes: int,
    block_logits: int,
) -> ChunkPlan:
    """The plan for `targets` rows of `hidden` [..., D] and the `weight` [V, D].

    Args:
        chunk_size: C; None for as many rows of logits as fit into `chunk_bytes`.
        block_logits: the most logits that are worked on at a time.
    """
    products = dtype_of_products(hidden, weight)
    few = targets <= FEW_TARGETS and products.itemsize == 2
    if few and on_a_cpu(hidden) and weight.dtype == torch.float32:
        products = torch.float32  # without a copy of the weight
    sums = torch.promote_types(products, torch.float32)

    vocabulary = len(weight)
    rows = chunk_size
    if rows is None:
        fitting = chunk_bytes // (vocabulary * products.itemsize)
        rows = max(64, fitting // 64 * 64)  # in multiples of 64
    rows = min(rows, MOST_ELEMENTS // vocabulary)

    weight_sums = sums
    few_chunks = targets <= MOST_CHUNKS_SUMMED_IN_BF16 * rows
    if few_chunks and weight.dtype == products == torch.bfloat16:
        weight_sums = products
    return ChunkPlan(rows, max(1, block_logits // vocabulary), products, sums, weight_sums)


def device_type(tensor: torch.Tensor) -> str:
    """The type of the device that computes the chunks; for "meta" that of this machine."""
    if tensor.is_meta:
        return machine().device
    return tensor.device.type


def on_a_cpu(tensor: torch.Tensor) -> bool:
    """Whether a CPU computes the chunks, and no GPU is pretended in a dry run."""
    return device_type(tensor) == "cpu" and not pretends_a_card()


def dtype_of_products(hidden: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """The dtype of a chunk's products: that of a linear layer, or fp32 where that is emulated."""
    dtype = torch.result_type(hidden, weight)
    device = device_type(hidden)
    if torch.is_autocast_enabled(device) and dtype != torch.float64:  # which autocast leaves alone
        dtype = torch.get_autocast_dtype(device)
    if on_a_cpu(hidden) and not _has_units_for(dtype):
        return torch.float32  # emulated 16-bit products take tens of times as long
    return dtype


def _has_units_for(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies in `dtype` itself. No CPU here does in fp16, some do in bf16."""
    if dtype == torch.bfloat16:
        return machine().native_bf16
    return dtype.itemsize >= 4


# --- products and gradients -----------------------------------------------------------------------


class LayerProducts:
    """An output layer in the dtype of its products: `factors` [V, D], `addend` [V] or None."""

    def __init__(self, layer: OutputLayer, products: torch.dtype, sums: torch.dtype) -> None:
        """What all chunks multiply with, in the dtype of their products."""
        self.factors = layer.weight.to(products)
        self.addend = None
        if layer.bias is not None:
            self.addend = layer.bias.to(products)
        self.softcap = layer.softcap
        self.sums = sums

    def room(self, rows: int) -> torch.Tensor:
        """Memory for the logits of so many rows. All chunks are written to it, in turn."""
        return self.factors.new_empty(rows, len(self.factors))

    def logits(self, inputs: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        """Logits of a chunk, without a cap: inputs [C, D] @ factors.T + addend [V], into `out`."""
        if self.addend is None:
            return torch.mm(inputs, self.factors.t(), out=out)
        return torch.addmm(self.addend, inputs, self.factors.t(), out=out)

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of a chunk under a cap c, c tanh(logits / c); without one as they are."""
        if not self.softcap:
            return logits
        return torch.tanh(logits.to(self.sums) / self.softcap).mul_(self.softcap)

    def through_the_cap_(self, gradient: torch.Tensor, capped: torch.Tensor) -> torch.Tensor:
        """In a chunk the gradient of capped logits becomes that of logits: times 1 - tanh²."""
        if self.softcap:
            gradient.mul_(capped.div_(self.softcap).square_().neg_().add_(1))
        return gradient


class LayerGradients(NamedTuple):
    """Gradients of the sum of the losses, to which chunks are added; None for what does not train.

    Those of the mean are smaller by the number of targets, and would vanish in fp16. So it is
    backward that divides.
    """

    hidden: torch.Tensor | None  # [T, D]
    weight: torch.Tensor | None  # [V, D]
    bias: torch.Tensor | None  # [V]

    def add_chunk_(
        self,
        index: torch.Tensor,
        d_logits: torch.Tensor,
        inputs: torch.Tensor,
        factors: torch.Tensor,
    ) -> None:
        """Add what the rows `index` [C] contribute: d_logits [C, V], inputs [C, D].

        `inputs` and `factors` [V, D] are what the logits were multiplied from.
        """
        if self.hidden is not None:
            # [C, D]: without a name, for by that it would still be there in the product below.
            self.hidden[index] = (d_logits @ factors).to(self.hidden.dtype)
        if self.weight is not None:
            if self.weight.dtype == inputs.dtype:
                self.weight.addmm_(d_logits.t(), inputs)  # [V, D], without a tensor in between
            else:
                self.weight.add_(d_logits.t() @ inputs)  # added in fp32
        if self.bias is not None:
            self.bias.add_(d_logits.sum(0, dtype=self.bias.dtype))  # [V]


class LossWithGradients(torch.autograd.Function):
    """A loss of hidden [T, D], weight [V, D], bias [V] and more, whose forward makes the gradients.

    After forward no logits are left from which backward could make them. A technique writes
    `forward`, with these three inputs first, and keeps two things for backward:

        ctx.gradients   LayerGradients of the sum of the losses, begun by `zero_gradients`
        ctx.divisor     what makes the sum a mean
    """

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of the chunked loss, times the factor that came."""
        if ctx.gradients is None:
            raise RuntimeError(
                "the first backward gave the gradients of this loss away: compute the loss again"
            )
        gradients = ctx.gradients
        ctx.gradients = None
        # One dimension, [1]: a GPU would round a scalar to 16 bits before it multiplies with it.
        factor = (grad_output / ctx.divisor).reshape(1)
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(factor)
        others = [None] * (len(ctx.needs_input_grad) - len(gradients))
        return *gradients, *others  # autograd casts them to the dtypes of the inputs


def zero_gradients(
    ctx: Any,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    plan: ChunkPlan,
    *,
    training: bool,
) -> LayerGradients:
    """The gradients of a chunked loss before the first chunk, of those of the three that train.

    `training` says whether gradients were on outside: inside of a Function they are always off.
    """
    # A row of hidden is in one chunk only: its gradient is no sum, and needs no wider dtype.
    dtypes = (hidden.dtype, plan.weight_sums, plan.sums)
    gradients = []
    for tensor, dtype, trains in zip((hidden, weight, bias), dtypes, ctx.needs_input_grad):
        gradient = None
        if training and trains:
            gradient = torch.zeros_like(tensor, dtype=dtype)
        gradients.append(gradient)
    return LayerGradients(*gradients)
