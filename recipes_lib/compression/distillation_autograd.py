"""The distillation loss of a chunk and its gradients, as one autograd function.

Part of distillation. Forward goes through the chunks once, and makes the gradients too. In a chunk
there are two tables of logits, the student's and the teacher's. The student's becomes the gradient.

Shapes: T tokens, N of them with a target, D and E hidden of student and teacher, V vocabulary,
C rows of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from recipes_lib.core.machine import machine

# The most logits of one table of a chunk. There are two tables.
CHUNK_BYTES = 2**25  # 32 MiB
CHUNK_BYTES_ON_GPU = 2**27

# Between the products a chunk is worked on in fp32, and for that in blocks of so many logits.
LOGITS_OF_A_BLOCK = 2**20
LOGITS_OF_A_BLOCK_ON_GPU = 2**23

# Kernels count the elements of a tensor in 32 bits.
MOST_ELEMENTS = 2**31 - 1


class OutputLayer(NamedTuple):
    """What makes logits of hidden states: `c tanh((hidden @ weight.T + bias) / c)`, c the cap."""

    weight: torch.Tensor  # [V, D]
    bias: torch.Tensor | None = None  # [V]
    softcap: float | None = None


@dataclass(frozen=True)
class Mixture:
    """How the two losses are mixed."""

    temperature: float
    teacher_share: float


@dataclass(frozen=True)
class ChunkPlan:
    """How many rows of logits exist at a time, and the dtypes to compute in."""

    rows: int  # C
    block_rows: int  # of a chunk that are worked on at a time between its products
    products: torch.dtype  # of the student's logits and of all products of its backward
    teacher_products: torch.dtype  # of the teacher's logits
    sums: torch.dtype  # of the loss, of what lies between the products, and of the weight's sum


def plan_chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    *,
    chunk_size: int | None,
) -> ChunkPlan:
    """The plan for hidden [..., D] of a student, teacher_hidden [..., E] and both output layers."""
    device = hidden.device.type
    if hidden.is_meta:
        device = machine().device  # a meta model is planned for this machine
    products = _dtype_of_products(hidden, weight, device)
    teacher_products = _dtype_of_products(teacher_hidden, teacher_weight, device)
    vocabulary = len(weight)

    chunk_bytes = CHUNK_BYTES
    logits_of_a_block = LOGITS_OF_A_BLOCK
    if device != "cpu":
        chunk_bytes = CHUNK_BYTES_ON_GPU
        logits_of_a_block = LOGITS_OF_A_BLOCK_ON_GPU
    rows = chunk_size
    if rows is None:
        fitting = chunk_bytes // (vocabulary * products.itemsize)
        rows = max(64, fitting // 64 * 64)
    return ChunkPlan(
        rows=min(rows, MOST_ELEMENTS // vocabulary),
        block_rows=max(1, logits_of_a_block // vocabulary),
        products=products,
        teacher_products=teacher_products,
        sums=torch.promote_types(products, torch.float32),
    )


def _dtype_of_products(hidden: torch.Tensor, weight: torch.Tensor, device: str) -> torch.dtype:
    """The dtype that a plain linear layer would compute in, or fp32 where that is emulated."""
    dtype = torch.result_type(hidden, weight)
    if torch.is_autocast_enabled(device) and dtype != torch.float64:  # which autocast leaves alone
        dtype = torch.get_autocast_dtype(device)
    has_units = device != "cpu" or (dtype == torch.bfloat16 and machine().native_bf16)
    if dtype.itemsize == 2 and not has_units:
        return torch.float32  # emulated 16-bit products take tens of times as long
    return dtype


class _Gradients(NamedTuple):
    """Of the sum of the losses; None for what does not train."""

    hidden: torch.Tensor | None  # [T, D]
    weight: torch.Tensor | None  # [V, D]
    bias: torch.Tensor | None  # [V]


class ChunkedDistillation(torch.autograd.Function):
    """The loss, whose forward makes the gradients of the student as well.

    Until backward they are those of the sum of all losses. Those of the mean are smaller by the
    number of targets, and would vanish in fp16.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        softcap: float | None,
        teacher_hidden: torch.Tensor,
        teacher: OutputLayer,
        rows: torch.Tensor,
        targets: torch.Tensor,
        divisor: torch.Tensor,
        mixture: Mixture,
        plan: ChunkPlan,
        training: bool,
    ) -> torch.Tensor:
        needs_gradient = (False, False, False)
        if training:
            needs_gradient = ctx.needs_input_grad[:3]
        gradients = _zeros(hidden, weight, bias, plan, needs_gradient)
        student = _Products(OutputLayer(weight, bias, softcap), plan.products, plan.sums)
        teacher = _Products(teacher, plan.teacher_products, plan.sums)

        # The logits of all chunks are written to the same memory, one chunk after the other.
        most = min(plan.rows, len(rows))
        room = student.room(most)  # [C, V]
        teacher_room = teacher.room(most)  # [C, V]
        total = hidden.new_zeros((), dtype=plan.sums)
        # index [C], the rows of this chunk; target [C, 1]
        for index, target in zip(rows.split(plan.rows), targets[:, None].split(plan.rows)):
            inputs = hidden[index].to(plan.products)  # [C, D]
            logits = student.logits(inputs, out=room[: len(index)])  # [C, V]
            of_teacher = teacher.logits(teacher_hidden[index], out=teacher_room[: len(index)])
            blocks = zip(*(each.split(plan.block_rows) for each in (logits, of_teacher, target)))
            for block in blocks:
                total += _loss_and_gradient_(*block, student, teacher, mixture)
            d_logits = logits  # by now: the loss has written its gradient over them
            _add_gradients_(gradients, index, d_logits, inputs, student.factors)

        ctx.divisor = divisor
        ctx.gradients = gradients
        return total / divisor

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
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
        no_gradient = [None] * 9  # of all that comes after the bias
        return *gradients, *no_gradient  # autograd casts them to the dtypes of the inputs


class _Products:
    """An output layer in the dtype of its products."""

    def __init__(self, layer: OutputLayer, products: torch.dtype, sums: torch.dtype) -> None:
        self.factors = layer.weight.to(products)  # [V, D]
        self.addend = None
        if layer.bias is not None:
            self.addend = layer.bias.to(products)  # [V]
        self.softcap = layer.softcap
        self.sums = sums

    def room(self, rows: int) -> torch.Tensor:
        """Memory for the logits of so many rows."""
        return self.factors.new_empty(rows, len(self.factors))

    def logits(self, inputs: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        """inputs [C, D] @ factors.T [D, V] + addend [V] in `out` [C, V]; not yet capped."""
        inputs = inputs.to(self.factors.dtype)
        if self.addend is None:
            return torch.mm(inputs, self.factors.t(), out=out)
        return torch.addmm(self.addend, inputs, self.factors.t(), out=out)

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of a block as the model has them, in the dtype of the sums."""
        logits = logits.to(self.sums)
        if self.softcap:
            return torch.tanh(logits / self.softcap).mul_(self.softcap)
        return logits


def _zeros(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    plan: ChunkPlan,
    needs_gradient: tuple[bool, ...],
) -> _Gradients:
    """The gradients before the first chunk."""
    # A row of hidden is in one chunk only: its gradient is no sum, and needs no wider dtype.
    wanted = [(hidden, hidden.dtype), (weight, plan.sums), (bias, plan.sums)]
    gradients = []
    for (tensor, dtype), needed in zip(wanted, needs_gradient):
        gradient = None
        if needed:
            gradient = torch.zeros_like(tensor, dtype=dtype)
        gradients.append(gradient)
    return _Gradients(*gradients)


def _loss_and_gradient_(
    logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    targets: torch.Tensor,
    student: _Products,
    teacher: _Products,
    mixture: Mixture,
) -> torch.Tensor:
    """The sum of the losses of a block of rows; the logits [C, V] become its gradient.

    Of one row, with w the teacher's share, t the temperature, p and q the softmax of the teacher's
    and the student's logits over t, and r the softmax of the student's own logits:

        loss      w t² sum(p (log p - log q))  -  (1 - w) log r[target]
        gradient  w t (q - p)  +  (1 - w) (r - onehot)
    """
    share = mixture.teacher_share
    temperature = mixture.temperature
    capped = student.capped(logits)  # [C, V]
    log_q = torch.log_softmax(capped / temperature, 1)  # [C, V]
    log_p = torch.log_softmax(teacher.capped(teacher_logits) / temperature, 1)  # [C, V]
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
    if student.softcap:
        slope = capped.div_(student.softcap).square_().neg_().add_(1)  # of the cap: 1 - tanh²
        gradient.mul_(slope)
    logits.copy_(gradient)
    return loss


def _add_gradients_(
    gradients: _Gradients,
    index: torch.Tensor,
    d_logits: torch.Tensor,
    inputs: torch.Tensor,
    factors: torch.Tensor,
) -> None:
    """Add what one chunk contributes: d_logits [C, V], inputs [C, D], factors [V, D]."""
    if gradients.hidden is not None:
        # [C, D]: without a name, for by that it would still be there in the product below.
        gradients.hidden[index] = (d_logits @ factors).to(gradients.hidden.dtype)
    if gradients.weight is not None:
        if gradients.weight.dtype == inputs.dtype:
            gradients.weight.addmm_(d_logits.t(), inputs)  # [V, D], without a tensor in between
        else:
            gradients.weight.add_(d_logits.t() @ inputs)  # added in fp32
    if gradients.bias is not None:
        gradients.bias.add_(d_logits.sum(0, dtype=gradients.bias.dtype))  # [V]
