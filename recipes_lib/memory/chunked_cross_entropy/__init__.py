"""Chunked cross-entropy: output layer and loss of a few hundred tokens at a time.

Problem    The logits and their gradients are the largest tensors of a step: 12 bytes x T x V.
Idea       The loss is a scalar, so the gradient of a chunk's logits is known at once, up to a
           factor:

               for h in chunks of hidden:      [C, D]   rows without a target are left out
                   x  = h W^T                  [C, V]   loss += sum(logsumexp(x) - x[target])
                   x  = softmax(x) - onehot    in place
                   dh = x W,  dW += x^T h      [C, D], [V, D]

           Backward multiplies both by the incoming gradient.
Saves      12 T V bytes become 4 C V (2 C V in 16 bits) for chunks of C tokens, the gradient of the
           hidden states, and that of the output layer W if it trains.
Costs      No more arithmetic, but the output has no logits. The gradient of a 16-bit W is summed in
           fp32, 6 V D bytes in all (in bf16 with up to 16 chunks of a bf16 W: 2 V D). A CPU without
           bf16 units multiplies with an fp32 copy.
Use when   T V is large: long sequences, large vocabularies, few targets.
Not when   Training needs the logits.
In production   `TrainingArguments(use_liger_kernel=True)`; `F.linear_cross_entropy(…, options=…)`;
           TRL has its own.
Source     Hsu et al., "Liger Kernel", arXiv 2410.10989; Wijmans et al., "Cut Your Losses", arXiv
           2411.09009.

Shapes: T tokens, D hidden, V vocabulary, C rows of a chunk, B batch, S sequence.

autograd  ... the loss of a chunk and its gradients
hf  ... the glue to a Hugging Face model
plan  ... the rows of a chunk and the dtypes
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn import functional as F

from recipes_lib.core.checks import check_choice, check_number, check_whole
from recipes_lib.core.model.causal_lm import final_softcap, require_causal_lm, without_adapters
from recipes_lib.core.model.chunked_loss import (
    ChunkPlan,
    check_labels,
    device_type,
    divisor_of_mean,
    hidden_bytes,
    last_block_bytes,
    planned_autocast,
    planned_targets,
    rows_with_a_target,
)
from recipes_lib.core.model.mixing import mix_in, unmix
from recipes_lib.core.model.output_layer import require_plain_loss
from recipes_lib.core.predict.budget import Budget, Order, Shape, estimate
from recipes_lib.core.predict.plain_step import head_of, head_trains
from recipes_lib.memory.chunked_cross_entropy.autograd import ChunkedLoss, Extras
from recipes_lib.memory.chunked_cross_entropy.hf import LossFromHidden
from recipes_lib.memory.chunked_cross_entropy.plan import LOGITS_OF_A_BLOCK, plan_chunks

# --- the idea: what a learner can copy ------------------------------------------------------------


@torch.no_grad()
def plain_chunked_loss(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *, chunk_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean loss of hidden [T, D] @ weight.T [D, V], and its gradients [T, D] and [V, D].

    Equal to `F.cross_entropy(hidden @ weight.T, labels)` and its backward, without [T, V].
    """
    tokens = len(labels)
    loss = hidden.new_zeros(())
    d_hidden = torch.zeros_like(hidden)  # [T, D]
    d_weight = torch.zeros_like(weight)  # [V, D]
    for start in range(0, tokens, chunk_size):
        chunk = slice(start, start + chunk_size)
        logits = hidden[chunk] @ weight.T  # [C, V]: the only tensor of this width
        loss += F.cross_entropy(logits, labels[chunk], reduction="sum")

        # The gradient of the loss with respect to these logits: softmax - onehot, [C, V].
        one_hot = F.one_hot(labels[chunk], num_classes=len(weight))
        d_logits = logits.softmax(dim=-1) - one_hot

        d_hidden[chunk] = d_logits @ weight  # [C, D]
        d_weight += d_logits.T @ hidden[chunk]  # [V, D]
    return loss / tokens, d_hidden / tokens, d_weight / tokens


# --- the technique --------------------------------------------------------------------------------


def apply_chunked_cross_entropy(
    model: Any,
    *,
    chunk_size: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Any:
    """Let a Hugging Face causal LM (adapters or not) compute its loss in chunks. Returns `model`.

    With `labels=` in training mode, or `skip_logits=True` in eval mode, the output has `loss` and
    no logits. The options are those of `chunked_cross_entropy`.

    Raises ValueError for wrong arguments, for a model that computes its loss itself or has a
    forward of its own, as a device map sets it, and if the loss is chunked already. The model's
    forward raises it if the logits are more than a linear layer, the factor and the soft cap
    of the configuration.
    """
    require_causal_lm(model)
    options = {"chunk_size": chunk_size, "label_smoothing": label_smoothing, "z_loss": z_loss}
    _check_options(**options)
    causal = without_adapters(model)
    if isinstance(causal, LossFromHidden):
        raise ValueError(
            "the loss is chunked already: call remove_chunked_cross_entropy(model) first"
        )
    require_plain_loss(causal)
    mix_in(causal, LossFromHidden, chunked_loss=functools.partial(chunked_cross_entropy, **options))
    return model


def remove_chunked_cross_entropy(model: Any) -> Any:
    """Give the causal LM its own class back. Raises ValueError if there is nothing to remove."""
    causal = without_adapters(model)
    if not isinstance(causal, LossFromHidden):
        raise ValueError("this model has no loss that apply_chunked_cross_entropy() has changed")
    unmix(causal, LossFromHidden, attributes=["chunked_loss"])
    return model


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    chunk_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    num_items: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """Cross-entropy of hidden [..., D] @ weight.T [D, V] + bias [V] and labels [...], shifted.

    Args:
        chunk_size: most rows of logits at a time. None: 64 MiB of them, 128 on a GPU.
        z_loss: adds this times the squared log-sum-exp of the logits.
        softcap: c makes the logits c tanh(logits / c).
        num_items: divides the sum, instead of the number of targets: that of the whole batch, when
            `labels` are those of one micro-batch.
    Returns the "mean" or "sum", in fp32 or fp64. Backward runs once. Raises ValueError for wrong
    options, shapes and labels, and for a mean over no target.
    """
    _check_options(chunk_size=chunk_size, label_smoothing=label_smoothing, z_loss=z_loss)
    if softcap is not None:
        check_number(above=0, softcap=softcap)
    check_whole(ignore_index=ignore_index, least=-(2**63))
    check_choice(("mean", "sum"), reduction=reduction)
    if reduction == "sum" and num_items is not None:
        raise ValueError(
            "reduction='sum' and num_items exclude each other: leave reduction out with num_items"
        )
    _check_shapes(hidden, weight, labels, bias)

    rows = rows_with_a_target(labels, ignore_index)  # [N]
    targets = labels.flatten()[rows]  # [N]
    check_labels(targets, len(weight), ignore_index)
    if reduction == "sum":
        num_items = 1
    divisor = divisor_of_mean(len(rows), num_items)
    plan = plan_chunks(hidden, weight, targets=len(rows), chunk_size=chunk_size)
    extras = Extras(softcap, label_smoothing, z_loss)
    training = torch.is_grad_enabled()  # inside a Function it is always off
    # The plan knows the dtype of each product: autocast would choose another one.
    with torch.autocast(hidden.device.type, enabled=False):
        tokens = hidden.reshape(-1, hidden.shape[-1])  # [T, D]
        return ChunkedLoss.apply(
            tokens, weight, bias, rows, targets, divisor, plan, extras, training
        )


# --- guards ---------------------------------------------------------------------------------------


def _check_options(*, chunk_size: int | None, label_smoothing: float, z_loss: float) -> None:
    """Raise ValueError for options that no loss has."""
    if chunk_size is not None:
        check_whole(chunk_size=chunk_size)
    check_number(least=0, below=1, label_smoothing=label_smoothing)
    check_number(least=0, z_loss=z_loss)


def _check_shapes(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Raise ValueError unless the shapes are [..., D], [V, D], [...] and [V]."""
    fits = weight.dim() == 2 and hidden.shape == (*labels.shape, weight.shape[1])
    shapes = [tuple(tensor.shape) for tensor in (hidden, weight, labels)]
    if bias is not None:
        fits = fits and bias.shape == weight.shape[:1]
        shapes.append(tuple(bias.shape))
    if not fits:
        raise ValueError(
            f"shapes of hidden, weight, labels, bias: {shapes} are not [..., D], [V, D], [...], [V]"
        )


# --- the arithmetic -------------------------------------------------------------------------------


@estimate(Order.LOSS)
def estimate_chunked_cross_entropy(
    budget: Budget,
    model: Any,
    shape: Shape,
    *,
    chunk_size: int | None = None,
    targets: int | None = None,
    dtype: torch.dtype | None = None,
) -> Budget:
    """The budget with a chunked loss.

    Args:
        targets: tokens of a micro-batch that have a label. None: all but the first of each row.
        dtype: of autocast, as in `estimate_mixed_precision`; None if this is called inside of it,
            or if there is none.
    Raises ValueError for a wrong chunk size, and if no token has a label.
    """
    _check_options(chunk_size=chunk_size, label_smoothing=0.0, z_loss=0.0)
    targets = planned_targets(shape, targets)
    head = head_of(model)
    with planned_autocast(head, dtype):
        plan = plan_chunks(head, head, targets=targets, chunk_size=chunk_size)
        spared = _spared_copy(budget, head)

    weight_gradient = 0
    if head_trains(budget, model):
        weight_gradient = head.numel() * plan.weight_sums.itemsize
    in_last_chunk = hidden_bytes(budget, model, shape) + _chunk_bytes(budget, model, plan, targets)
    in_last_block = last_block_bytes(budget, model, shape)
    return budget.change(
        activations=budget.activations - spared,
        loss=weight_gradient + max(in_last_chunk, in_last_block),
    )


def _spared_copy(budget: Budget, head: torch.Tensor) -> int:
    """Bytes of the 16-bit copy of the output layer that autocast would keep until backward.

    `estimate_mixed_precision` has counted it among the activations. The chunked loss keeps none.
    """
    counted = any(done.name == "estimate_mixed_precision" for done in budget.applied)
    casts = torch.is_autocast_enabled(device_type(head)) and head.dtype == torch.float32
    return 2 * head.numel() if counted and casts else 0


def _chunk_bytes(budget: Budget, model: Any, plan: ChunkPlan, targets: int) -> int:
    """What is alive at the largest moment of one chunk, beside the gradients."""
    head = head_of(model)
    vocabulary, width = head.shape
    rows = min(plan.rows, targets)
    size = plan.products.itemsize

    logits = rows * vocabulary * size
    # Of this chunk; and beside them their gradient, or those of the chunk before.
    inputs = 2 * rows * width * size
    weight_copy = 0
    if plan.products != head.dtype:
        weight_copy = head.numel() * size
    between_products = _block_bytes(model, plan, rows)
    in_products = _sum_bytes(budget, model, plan)
    return logits + inputs + weight_copy + max(between_products, in_products)


def _block_bytes(model: Any, plan: ChunkPlan, rows: int) -> int:
    """Between the products: the fp32 log-softmax of a block, and the logits in fp32 beside it.

    That copy of the logits exists where they are capped, or have 16 bits.
    """
    block = 4 * min(rows * len(head_of(model)), LOGITS_OF_A_BLOCK)
    if final_softcap(model) or plan.products.itemsize == 2:
        return 2 * block
    return block


def _sum_bytes(budget: Budget, model: Any, plan: ChunkPlan) -> int:
    """In the products: the chunk's part of the weight's gradient, before a sum in another dtype."""
    if not head_trains(budget, model) or plan.products == plan.weight_sums:
        return 0
    return head_of(model).numel() * plan.products.itemsize
