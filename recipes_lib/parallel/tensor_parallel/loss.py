"""The loss of logits that are cut by the vocabulary, and never joined.

    rank 0    logits [T, 0 .. V/2)     its largest, its sum of exponentials, its logit of the label
    rank 1    logits [T, V/2 .. V)     likewise
              all-reduce of the largest, then of the other two: three numbers per token

    loss = log(sum of exp(logit - largest)) - (logit of the label - largest)

In backward each rank has what it needs: the softmax of its part, minus 1 where the label is.
PyTorch's `loss_parallel()` computes the same, and needs its context around backward, too.

Source: Shoeybi et al., "Megatron-LM" (arXiv 1909.08053), section 3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recipes_lib.core.model.loss import at_least_fp32, next_tokens
from recipes_lib.core.model.second_derivatives import first_derivatives_only
from recipes_lib.parallel.tensor_parallel.styles import first_of_rank

NOT_COUNTED = -100


def cut_causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = NOT_COUNTED,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """What transformers calls as `model.loss_function`, for logits [B, S, V] cut by V.

    labels [B, S], or shift_labels [B, S] that already stand where they are predicted, are the same
    on all ranks. The loss is the mean over the labels that count, or their sum divided by
    `num_items_in_batch`: on each rank the same plain number.
    """
    if shift_labels is None:
        shift_labels = next_tokens(labels, ignored=ignore_index)
    targets = shift_labels.reshape(-1).to(logits.device)
    part = logits.to_local()  # [B, S, V/N]
    part = part.reshape(-1, part.shape[-1])
    counted = targets != ignore_index
    first = first_of_rank(logits.shape[-1], logits.device_mesh)
    group = logits.device_mesh.get_group()
    losses = _CutCrossEntropy.apply(part, targets, counted, first, group)  # [T]
    if num_items_in_batch is None:
        num_items_in_batch = counted.sum()
    return losses.sum() / num_items_in_batch


class _CutCrossEntropy(torch.autograd.Function):
    """Losses [T] of logits [T, V/N] from token `first` on, 0 where a token is not counted."""

    @staticmethod
    def forward(
        context: Any,
        part: Tensor,
        targets: Tensor,
        counted: Tensor,
        first: int,
        group: dist.ProcessGroup,
    ) -> Tensor:
        """Each rank has the sum of exp of its own tokens; one all-reduce makes the whole."""
        logits = at_least_fp32(part)
        largest = logits.amax(dim=-1)  # [T], of this rank's tokens
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)  # and now of all
        shifted = logits - largest[:, None]  # 0 at most, so no exponential overflows

        column, is_here = _where_labels_are(targets, counted, part.shape[-1], first)
        label_logit = shifted.gather(1, column[:, None]).squeeze(1)
        label_logit = label_logit.where(is_here, 0.0)  # one rank has it, the others add 0
        exponentials = shifted.exp_()  # in the same memory: the shifted logits are done with
        own_sums = torch.stack([exponentials.sum(dim=-1), label_logit])  # [2, T], one message
        dist.all_reduce(own_sums, dist.ReduceOp.SUM, group)
        sum_of_exponentials, label_logit = own_sums

        softmax = exponentials.div_(sum_of_exponentials[:, None])
        context.save_for_backward(softmax, column, is_here, counted)
        context.dtype = part.dtype
        return (sum_of_exponentials.log() - label_logit).where(counted, 0.0)

    @staticmethod
    @first_derivatives_only
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of this rank's logits: softmax less the label."""
        softmax, column, is_here, counted = context.saved_tensors
        gradient = gradient.where(counted, 0.0)  # [T]
        of_logits = softmax * gradient[:, None]  # [T, V/N]
        at_label = gradient.where(is_here, 0.0)
        of_logits.scatter_add_(1, column[:, None], -at_label[:, None])  # minus 1 at the label
        return of_logits.to(context.dtype), None, None, None, None


def _where_labels_are(
    targets: Tensor, counted: Tensor, tokens_here: int, first: int
) -> tuple[Tensor, Tensor]:
    """The column of each label [T] among this rank's tokens, and whether it is there at all.

    Where it is not, the column is 0, which can be read and does not count.
    """
    column = targets - first
    is_here = counted & (column >= 0) & (column < tokens_here)
    return column.where(is_here, 0), is_here
