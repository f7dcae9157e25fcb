"""The loss of a chunk and its gradients, as one autograd function.

Part of chunked_cross_entropy. Forward goes through the chunks once, and makes the gradients too:
after it, no logits are left from which backward could make them.

Shapes: T tokens, N of them with a target, D hidden, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from recipes_lib.memory.chunked_cross_entropy_plan import ChunkPlan


@dataclass(frozen=True)
class Extras:
    """What is added to plain cross-entropy."""

    softcap: float | None
    label_smoothing: float
    z_loss: float


class _Gradients(NamedTuple):
    """Of the sum of the losses; None for what does not train."""

    hidden: torch.Tensor | None  # [T, D]
    weight: torch.Tensor | None  # [V, D]
    bias: torch.Tensor | None  # [V]


class ChunkedLoss(torch.autograd.Function):
    """The loss, whose forward makes the gradients as well.

    Until backward they are those of the sum of all losses. Those of the mean are smaller by the
    number of targets, and would vanish in fp16.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, rows, targets, divisor, plan, extras, training):
        needs_gradient = (False, False, False)
        if training:
            needs_gradient = ctx.needs_input_grad[:3]
        gradients = _zeros(hidden, weight, bias, plan, needs_gradient)
        total = hidden.new_zeros((), dtype=plan.sums)

        factors = weight.to(plan.products)  # [V, D]
        addend = None
        if bias is not None:
            addend = bias.to(plan.products)  # [V]
        # The logits of all chunks are written to the same memory, one after the other.
        most = min(plan.rows, len(rows))
        buffer = hidden.new_empty(most, len(weight), dtype=plan.products)  # [C, V]
        # index [C], the rows of this chunk; target [C, 1]
        for index, target in zip(rows.split(plan.rows), targets[:, None].split(plan.rows)):
            inputs = hidden[index].to(plan.products)  # [C, D]
            logits = _logits(inputs, factors, addend, out=buffer[: len(index)])  # [C, V]
            blocks = zip(logits.split(plan.block_rows), target.split(plan.block_rows))
            for block_logits, block_target in blocks:
                total += _loss_and_gradient_(block_logits, block_target, plan.sums, extras)
            d_logits = logits  # by now: the loss has written its gradient over them
            _add_gradients_(gradients, index, d_logits, inputs, factors, plan)

        ctx.divisor = divisor
        ctx.gradients = gradients
        return total / divisor

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_output):
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
        no_gradient = [None] * 6  # rows, targets, divisor, plan, extras, training
        return *gradients, *no_gradient  # autograd casts them to the dtypes of the inputs


def _zeros(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    plan: ChunkPlan,
    needs_gradient: tuple[bool, ...],
) -> _Gradients:
    """The gradients before the first chunk."""
    # A row of hidden is in one chunk only: its gradient is no sum, and needs no wider dtype.
    wanted = [(hidden, hidden.dtype), (weight, plan.weight_sums), (bias, plan.sums)]
    gradients = []
    for (tensor, dtype), needed in zip(wanted, needs_gradient):
        gradient = None
        if needed:
            gradient = torch.zeros_like(tensor, dtype=dtype)
        gradients.append(gradient)
    return _Gradients(*gradients)


def _logits(
    inputs: torch.Tensor, factors: torch.Tensor, addend: torch.Tensor | None, *, out: torch.Tensor
) -> torch.Tensor:
    """inputs [C, D] @ factors.T [D, V] + addend [V], written to `out` [C, V]."""
    if addend is None:
        return torch.mm(inputs, factors.t(), out=out)
    return torch.addmm(addend, inputs, factors.t(), out=out)


def _loss_and_gradient_(
    logits: torch.Tensor, targets: torch.Tensor, sums: torch.dtype, extras: Extras
) -> torch.Tensor:
    """The sum of the losses of logits [C, V] and targets [C, 1]; the logits become its gradient.

    Of one row, with s the label smoothing, z the z-loss and p the softmax:

        loss      (1 - s) (-log p[target])  +  s mean(-log p)  +  z logsumexp²
        gradient  p (1 + 2 z logsumexp)  -  s / V  -  (1 - s) onehot
    """
    smoothing = extras.label_smoothing
    capped = logits
    if extras.softcap:
        capped = torch.tanh(logits.to(sums) / extras.softcap).mul_(extras.softcap)

    log_probability = torch.log_softmax(capped, 1, dtype=sums)  # [C, V]
    of_target = log_probability.gather(1, targets)  # [C, 1]
    log_sum = capped.gather(1, targets) - of_target  # [C, 1], log-sum-exp
    of_all = 0
    if smoothing:
        of_all = log_probability.mean(1, keepdim=True)  # [C, 1]
    squares = extras.z_loss * log_sum.square()
    losses = squares - (1 - smoothing) * of_target - smoothing * of_all  # [C, 1]

    # From here on in place: the softmax in the memory of its logarithm, then the gradient.
    gradient = log_probability.exp_()  # [C, V]
    if smoothing or extras.z_loss:
        gradient.mul_(1 + 2 * extras.z_loss * log_sum)
        gradient.sub_(smoothing / gradient.shape[1])
    gradient.scatter_add_(1, targets, torch.full_like(of_target, smoothing - 1))
    if extras.softcap:
        slope = capped.div_(extras.softcap).square_().neg_().add_(1)  # of the cap: 1 - tanh²
        gradient.mul_(slope)
    logits.copy_(gradient)
    return losses.sum()


def _add_gradients_(
    gradients: _Gradients,
    index: torch.Tensor,
    d_logits: torch.Tensor,
    inputs: torch.Tensor,
    factors: torch.Tensor,
    plan: ChunkPlan,
) -> None:
    """Add what one chunk contributes: d_logits [C, V], inputs [C, D], factors [V, D]."""
    if gradients.hidden is not None:
        # [C, D]: without a name, for by that it would still be there in the product below.
        gradients.hidden[index] = (d_logits @ factors).to(gradients.hidden.dtype)
    if gradients.weight is not None:
        if plan.weight_sums == plan.products:
            gradients.weight.addmm_(d_logits.t(), inputs)  # [V, D], without a tensor in between
        else:
            gradients.weight.add_(d_logits.t() @ inputs)  # added in fp32
    if gradients.bias is not None:
        gradients.bias.add_(d_logits.sum(0, dtype=plan.sums))  # [V]
