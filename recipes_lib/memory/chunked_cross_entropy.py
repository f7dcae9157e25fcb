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
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from recipes_lib.core.data.tokens_and_labels import IGNORED
from recipes_lib.core.measure.dry_run import without_repetition
from recipes_lib.core.model.causal_lm import without_adapters
from recipes_lib.core.model.chunked_loss import (
    LayerProducts,
    LossWithGradients,
    divisor_of_mean,
    on_a_cpu,
    plan_chunks,
    rows_with_a_target,
    zero_gradients,
)
from recipes_lib.core.model.mixins import mix_in
from recipes_lib.core.model.output_layer import (
    OutputLayer,
    beside_weight_and_bias,
    makes_plain_logits,
    options_by_name,
    output_layer_of,
    run_to_the_output_layer,
    targets_of,
    with_loss,
)
from recipes_lib.core.model.probe import proves

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


@proves(
    "exact",
    # A router's loss that is forgotten is 3e-4 of the loss, and 16 bits hide it in the gradients.
    loss_bound=1e-4,
    tried_with={"chunk_size": 7},
)
def apply_chunked_cross_entropy(model: Any, *, chunk_size: int | None = None) -> Any:
    """Let a Hugging Face causal LM (adapters or not) compute its loss in chunks. Returns `model`.

    With `labels=` in training mode the output has `loss` and no logits. `chunk_size` is that of
    `chunked_cross_entropy`.
    """
    loss = functools.partial(chunked_cross_entropy, chunk_size=chunk_size)
    mix_in(without_adapters(model), LossFromHidden, chunked_loss=loss)
    return model


class LossFromHidden:
    """What is mixed into the class of a causal LM: a loss without all logits."""

    chunked_loss: Callable[..., torch.Tensor]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """A forward with the loss in chunks: with labels in training mode there are no logits."""
        kwargs = options_by_name(super().forward, args, kwargs)
        if kwargs.get("labels") is None or not self.training:
            return super().forward(**kwargs)

        without_loss = kwargs | {"labels": None, "return_dict": True}
        run = functools.partial(super().forward, **without_loss)
        output, hidden = run_to_the_output_layer(self, run)
        layer = output_layer_of(self)
        problem = _why_not(self, output, hidden, layer)
        if problem:
            raise ValueError(
                f"{type(self).__name__} {problem}, which a chunked loss would leave out: "
                f"take it out and train on the model's own loss"
            )

        loss = self.chunked_loss(
            hidden,
            layer.weight,
            targets_of(kwargs).to(hidden.device),
            bias=layer.bias,
            softcap=layer.softcap,
            num_items=kwargs.get("num_items_in_batch"),
            ignore_index=kwargs.get("ignore_index", IGNORED),
        )
        return with_loss(self, output, loss, kwargs)


def _why_not(model: Any, output: Any, hidden: torch.Tensor, layer: OutputLayer) -> str | None:
    """Why the loss cannot be in chunks: what the model does with logits beside its output layer."""
    others = beside_weight_and_bias(model.get_output_embeddings())
    if any(parameter.requires_grad for parameter in others):
        return "has adapters on its output layer"
    if "aux_loss" in output:
        return "adds a router's loss"
    if not makes_plain_logits(output, hidden, layer):
        return "scales its logits or changes them otherwise"
    return None


# --- the loss in chunks ---------------------------------------------------------------------------

# The most logits of a chunk. Larger chunks are hardly faster: the products are large enough.
CHUNK_BYTES = 2**26  # 64 MiB
CHUNK_BYTES_ON_GPU = 2**27

# Between the products, a chunk is worked on in blocks of so many logits.
LOGITS_OF_A_BLOCK = 2**22


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    chunk_size: int | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    num_items: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean cross-entropy of hidden [..., D] @ weight.T [D, V] + bias [V] and labels [...], shifted.

    Args:
        chunk_size: most rows of logits at a time. None: 64 MiB of them, 128 on a GPU.
        softcap: c makes the logits c tanh(logits / c).
        num_items: divides the sum, instead of the number of targets: that of the whole batch, when
            `labels` are those of one micro-batch.
    Returns fp32 or fp64. Backward runs once.
    """
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(f"hidden {[*hidden.shape]}, labels {[*labels.shape]}: one label per token")

    rows = rows_with_a_target(labels, ignore_index)  # [N]
    targets = labels.flatten()[rows]  # [N]
    divisor = divisor_of_mean(len(rows), num_items)
    chunk_bytes = CHUNK_BYTES_ON_GPU
    if on_a_cpu(hidden):
        chunk_bytes = CHUNK_BYTES
    plan = plan_chunks(
        hidden,
        weight,
        targets=len(rows),
        chunk_size=chunk_size,
        chunk_bytes=chunk_bytes,
        block_logits=LOGITS_OF_A_BLOCK,
    )
    training = torch.is_grad_enabled()  # inside a Function it is always off
    # The plan knows the dtype of each product: autocast would choose another one.
    with torch.autocast(hidden.device.type, enabled=False):
        tokens = hidden.reshape(-1, hidden.shape[-1])  # [T, D]
        return ChunkedLoss.apply(
            tokens, weight, bias, softcap, rows, targets, divisor, plan, training
        )


class ChunkedLoss(LossWithGradients):
    """The loss of hidden [T, D], weight [V, D] and bias [V]; forward makes the gradients, too."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, softcap, rows, targets, divisor, plan, training):
        """The loss of one chunk of logits after the other, each with its gradients."""
        gradients = zero_gradients(ctx, hidden, weight, bias, plan, training=training)
        layer = LayerProducts(OutputLayer(weight, bias, softcap), plan.products, plan.sums)
        room = layer.room(min(plan.rows, len(rows)))  # [C, V]
        total = hidden.new_zeros((), dtype=plan.sums)
        # index [C], the rows of this chunk; target [C, 1]
        chunks = list(zip(rows.split(plan.rows), targets[:, None].split(plan.rows)))
        for index, target in without_repetition(chunks):
            inputs = hidden[index].to(plan.products)  # [C, D]
            logits = layer.logits(inputs, out=room[: len(index)])  # [C, V]
            blocks = list(zip(logits.split(plan.block_rows), target.split(plan.block_rows)))
            for block_logits, block_target in without_repetition(blocks):
                total += _loss_and_gradient_(block_logits, block_target, layer)
            d_logits = logits  # by now: the loss has written its gradient over them
            gradients.add_chunk_(index, d_logits, inputs, layer.factors)

        ctx.divisor = divisor
        ctx.gradients = gradients
        return total / divisor


def _loss_and_gradient_(
    logits: torch.Tensor, targets: torch.Tensor, layer: LayerProducts
) -> torch.Tensor:
    """Of a chunk: the sum of the losses of logits [C, V]; the logits become its gradient.

    Of one row, with p the softmax, the loss is -log p[target], and the gradient p - onehot.
    """
    capped = layer.capped(logits)
    log_probability = torch.log_softmax(capped, 1, dtype=layer.sums)  # [C, V]
    of_target = log_probability.gather(1, targets)  # [C, 1]

    # From here on in place: the softmax in the memory of its logarithm, then the gradient.
    gradient = log_probability.exp_()  # [C, V]
    gradient.scatter_add_(1, targets, torch.full_like(of_target, -1))
    logits.copy_(layer.through_the_cap_(gradient, capped))
    return -of_target.sum()
