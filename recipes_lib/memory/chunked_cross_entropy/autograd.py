"""The loss of a chunk and its gradients, as one autograd function.

Part of chunked_cross_entropy. Forward goes through the chunks once, and makes the gradients too;
`core.chunked_loss` says why, and has what the loss does not change.

Shapes: T tokens, N of them with a target, D hidden, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from recipes_lib.core.model.chunked_loss import LayerProducts, LossWithGradients, zero_gradients


@dataclass(frozen=True)
class Extras:
    """What is added to plain cross-entropy."""

    softcap: float | None
    label_smoothing: float
    z_loss: float


class ChunkedLoss(LossWithGradients):
    """The loss of hidden [T, D], weight [V, D] and bias [V], and its gradients."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, rows, targets, divisor, plan, extras, training):
        gradients = zero_gradients(ctx, hidden, weight, bias, plan, training=training)
        layer = LayerProducts(weight, bias, plan.products)
        room = layer.room(min(plan.rows, len(rows)))  # [C, V]
        total = hidden.new_zeros((), dtype=plan.sums)
        # index [C], the rows of this chunk; target [C, 1]
        for index, target in zip(rows.split(plan.rows), targets[:, None].split(plan.rows)):
            inputs = hidden[index].to(plan.products)  # [C, D]
            logits = layer.logits(inputs, out=room[: len(index)])  # [C, V]
            blocks = zip(logits.split(plan.block_rows), target.split(plan.block_rows))
            for block_logits, block_target in blocks:
                total += _loss_and_gradient_(block_logits, block_target, plan.sums, extras)
            d_logits = logits  # by now: the loss has written its gradient over them
            gradients.add_chunk_(index, d_logits, inputs, layer.factors)

        ctx.divisor = divisor
        ctx.gradients = gradients
        return total / divisor


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
