"""The loss of two models from what their output layers read, chunk by chunk.

Part of distillation. Forward goes through the chunks once, and makes the gradients too, as
`core.model.chunked_loss` describes. Here a chunk has two tables of logits, the student's and the
teacher's. The student's becomes the gradient.

Shapes: T tokens, N of them with a target, D and E hidden of student and teacher, V vocabulary,
C rows of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from recipes_lib.core.model.chunked_loss import (
    ChunkPlan,
    LayerProducts,
    LossWithGradients,
    divisor_of_mean,
    dtype_of_products,
    on_a_cpu,
    plan_chunks,
    rows_with_a_target,
    zero_gradients,
)
from recipes_lib.core.model.output_layer import OutputLayer

# The most logits of one table of a chunk. There are two tables.
CHUNK_BYTES = 2**25  # 32 MiB
CHUNK_BYTES_ON_GPU = 2**27

# Between the products, a chunk is worked on in blocks of so many logits.
LOGITS_OF_A_BLOCK = 2**20
LOGITS_OF_A_BLOCK_ON_GPU = 2**23


def distillation_loss(
    hidden: Tensor,
    layer: OutputLayer,
    teacher_hidden: Tensor,
    teacher_layer: OutputLayer,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    teacher_share: float = 0.5,
    chunk_size: int | None = None,
    ignore_index: int = -100,
    num_items: int | Tensor | None = None,
) -> Tensor:
    """`plain_distillation_loss` of two models, from what their output layers read.

    Args:
        hidden: [..., D]; teacher_hidden: [..., E]; labels: [...], shifted: what each position has
            to predict. Positions with `ignore_index` count in neither loss.
        layer: OutputLayer(weight [V, D], bias [V] or None, soft cap or None); teacher_layer: the
            same with E. The teacher's get no gradients.
        num_items: divides the sum, instead of the number of targets: that of the whole batch, when
            `labels` are those of one micro-batch.
    Returns the mean in fp32 or fp64. Backward runs once.
    """
    rows = rows_with_a_target(labels, ignore_index)  # [N]
    targets = labels.flatten()[rows]  # [N]
    chunk_bytes = CHUNK_BYTES_ON_GPU
    block_logits = LOGITS_OF_A_BLOCK_ON_GPU
    if on_a_cpu(hidden):
        chunk_bytes = CHUNK_BYTES
        block_logits = LOGITS_OF_A_BLOCK
    plan = plan_chunks(
        hidden,
        layer.weight,
        targets=len(rows),
        chunk_size=chunk_size,
        chunk_bytes=chunk_bytes,
        block_logits=block_logits,
    )
    plan = replace(plan, weight_sums=plan.sums)  # whatever the number of chunks
    teacher_products = dtype_of_products(teacher_hidden, teacher_layer.weight)
    training = torch.is_grad_enabled()  # inside a Function it is always off
    # The plan knows the dtype of each product: autocast would choose another one.
    with torch.autocast(hidden.device.type, enabled=False):
        return ChunkedDistillation.apply(
            hidden.reshape(-1, hidden.shape[-1]),  # [T, D]
            *layer,
            teacher_hidden.detach().reshape(-1, teacher_hidden.shape[-1]),  # [T, E]
            teacher_layer,
            rows,
            targets,
            divisor_of_mean(len(rows), num_items),
            Mixture(temperature, teacher_share),
            plan,
            teacher_products,
            training,
        )


@dataclass(frozen=True)
class Mixture:
    temperature: float
    teacher_share: float


class ChunkedDistillation(LossWithGradients):
    """The loss of the student's hidden [T, D], weight [V, D] and bias [V], and its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        softcap: float | None,
        teacher_hidden: Tensor,
        teacher_layer: OutputLayer,
        rows: Tensor,
        targets: Tensor,
        divisor: Tensor,
        mixture: Mixture,
        plan: ChunkPlan,
        teacher_products: torch.dtype,
        training: bool,
    ) -> Tensor:
        """The distillation loss as a sum over chunks, with logits of both models for one alone."""
        gradients = zero_gradients(ctx, hidden, weight, bias, plan, training=training)
        student = LayerProducts(OutputLayer(weight, bias, softcap), plan.products, plan.sums)
        teacher = LayerProducts(teacher_layer, teacher_products, plan.sums)
        most = min(plan.rows, len(rows))
        room = student.room(most)  # [C, V]
        teacher_room = teacher.room(most)  # [C, V]
        total = hidden.new_zeros((), dtype=plan.sums)
        # index [C], the rows of this chunk; target [C, 1]
        for index, target in zip(rows.split(plan.rows), targets[:, None].split(plan.rows)):
            inputs = hidden[index].to(plan.products)  # [C, D]
            logits = student.logits(inputs, out=room[: len(index)])  # [C, V]
            of_teacher = teacher.logits(
                teacher_hidden[index].to(teacher_products),  # [C, E]
                out=teacher_room[: len(index)],
            )
            blocks = zip(*(each.split(plan.block_rows) for each in (logits, of_teacher, target)))
            for block in blocks:
                total += _loss_and_gradient_(*block, student, teacher, mixture)
            d_logits = logits  # by now: the loss has written its gradient over them
            gradients.add_chunk_(index, d_logits, inputs, student.factors)

        ctx.divisor = divisor
        ctx.gradients = gradients
        return total / divisor


def _loss_and_gradient_(
    logits: Tensor,
    teacher_logits: Tensor,
    targets: Tensor,
    student: LayerProducts,
    teacher: LayerProducts,
    mixture: Mixture,
) -> Tensor:
    """The sum of a student's losses in a chunk; its logits [C, V] become their gradient.

    Of one row, with w the teacher's share, t the temperature, p and q the softmax of the teacher's
    and the student's logits over t, and r the softmax of the student's own logits:

        loss      w t² sum(p (log p - log q))  -  (1 - w) log r[target]
        gradient  w t (q - p)  +  (1 - w) (r - onehot)
    """
    share = mixture.teacher_share
    temperature = mixture.temperature
    capped = student.capped(logits).to(student.sums)  # [C, V]
    log_q = torch.log_softmax(capped / temperature, 1)  # [C, V]
    log_p = torch.log_softmax(teacher.capped(teacher_logits).to(student.sums) / temperature, 1)
    p = log_p.exp()  # [C, V]
    divergence = log_p.sub_(log_q).mul_(p).sum()
    loss = share * temperature**2 * divergence

    gradient = log_q.exp_().sub_(p).mul_(share * temperature)  # [C, V]
    if share < 1:
        log_r = torch.log_softmax(capped, 1)  # [C, V]
        of_target = log_r.gather(1, targets)  # [C, 1]
        loss = loss - (1 - share) * of_target.sum()
        r_minus_one_hot = log_r.exp_()
        r_minus_one_hot.scatter_add_(1, targets, torch.full_like(of_target, -1))
        gradient.add_(r_minus_one_hot, alpha=1 - share)
    logits.copy_(student.through_the_cap_(gradient, capped))
    return loss
