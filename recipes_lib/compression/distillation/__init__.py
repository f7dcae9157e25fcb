"""Knowledge distillation: a small model learns all that a large one says about the next token.

Problem    A small model that trains on text learns one token per position. What else could stand
           there, and how likely it is, the text does not say. A larger model that is trained
           already does say it, in the whole distribution over the vocabulary.
Idea       Train the student on two losses, with p the softmax of the teacher's logits over a
           temperature t, and q that of the student's:

               loss = w t² KL(p ‖ q)  +  (1 - w) cross-entropy with the text

           The gradient of a softmax over t is smaller by t, and so is the difference of p and q:
           t² makes up for both, and w keeps its meaning at any temperature.

           Two models make two tables of logits [T, V]. The loss is a scalar, so the gradient of
           the student's logits is known chunk by chunk, and no table is ever whole:

               for h, g in chunks of hidden:     [C, D], [C, E]
                   x = h W^T,  y = g U^T         [C, V] each
                   x = w t (q - p) + (1 - w) (softmax(x) - onehot)      in place
                   dh = x W,  dW += x^T h
Saves      Seven tables of 4 T V bytes become two of 4 C V for chunks of C tokens, and blocks
           between the products. The gradient of W remains: 4 V D bytes.
Costs      A forward of the teacher in every step, and its weights. 16-bit weights of the output
           layers are copied to fp32 on a CPU without bf16 units.
Use when   A student is to replace a trained model that is too slow or too large, and both have the
           same tokens. After layers or channels were cut away: see `student`.
Not when   The teacher is hardly better than the student, or the text is not what the teacher is
           good at: then the text itself is the better teacher. The tokens differ.
In production   NVIDIA Model Optimizer `modelopt.torch.distill` (after its Minitron pruning);
           TRL `trl.experimental.gkd.GKDTrainer`, also on the student's own answers, and with
           `use_liger_kernel` chunk by chunk; Liger `LigerFusedLinearJSDLoss`; torchtune
           `ForwardKLWithChunkedOutputLoss`, which makes the logits and chunks what follows.
Source     Hinton et al., "Distilling the Knowledge in a Neural Network", arXiv 1503.02531;
           hidden states: Sanh et al., "DistilBERT", arXiv 1910.01108; Muralidharan et al.,
           "Compact Language Models via Pruning and Knowledge Distillation", arXiv 2407.14679.

Shapes: T tokens, N of them with a target, D and E hidden of student and teacher, V vocabulary,
C rows of a chunk, B batch, S sequence.

autograd  ... the loss of a chunk and its gradients
checks  ... what student and teacher must have in common
hf  ... the glue to two Hugging Face models
hidden  ... hidden states brought together block by block
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from recipes_lib.compression.distillation.autograd import (
    ChunkedDistillation,
    Mixture,
    TwoTablesPlan,
    plan_chunks,
)
from recipes_lib.compression.distillation.checks import check_models, check_options, check_shapes
from recipes_lib.compression.distillation.hf import PlainLoss, Ran, Taught, Teaching
from recipes_lib.compression.distillation.hidden import (
    checked_pairs,
    hidden_state_loss,
    pair_bytes,
)
from recipes_lib.core.checks import check_number, check_whole
from recipes_lib.core.model.causal_lm import require_causal_lm, without_adapters
from recipes_lib.core.model.chunked_loss import (
    check_labels,
    divisor_of_mean,
    hidden_bytes,
    last_block_bytes,
    planned_autocast,
    planned_targets,
    rows_with_a_target,
)
from recipes_lib.core.model.mixing import mix_in, unmix
from recipes_lib.core.model.output_layer import OutputLayer, require_plain_loss
from recipes_lib.core.model.sizes import weight_bytes
from recipes_lib.core.predict.budget import Budget, Order, Shape, estimate
from recipes_lib.core.predict.plain_step import head_of, head_trains

# --- the idea: what a learner can copy ------------------------------------------------------------


def plain_distillation_loss(
    logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float,
    teacher_share: float,
) -> torch.Tensor:
    """The mean loss of logits [T, V] against teacher_logits [T, V] and labels [T]."""
    # What both say about the next token, at a temperature that shows the unlikely ones as well.
    log_p = (teacher_logits / temperature).log_softmax(dim=-1)  # [T, V]
    log_q = (logits / temperature).log_softmax(dim=-1)  # [T, V]
    divergence = (log_p.exp() * (log_p - log_q)).sum(dim=-1).mean()

    # What the text says.
    cross_entropy = F.cross_entropy(logits, labels)
    of_teacher = teacher_share * temperature**2 * divergence
    return of_teacher + (1 - teacher_share) * cross_entropy


# --- the technique --------------------------------------------------------------------------------


def apply_distillation(
    student: Any,
    teacher: Any,
    *,
    temperature: float = 1.0,
    teacher_share: float = 0.5,
    block_pairs: Iterable[tuple[int, int]] = (),
    hidden_weight: float = 1.0,
    chunk_size: int | None = None,
) -> Any:
    """Let `student(input_ids, labels=…)` have the loss above in training mode. Returns `student`.

    Any loop trains it: the output has `loss` and no logits. In eval mode the student is as before.
    The teacher runs without gradients and in eval mode, whatever mode it is in, and is no part of
    the student: not of its parameters, its state dict or what it saves.

    Args:
        teacher_share: w above, above 0 and up to 1. 1 takes nothing from the labels but which
            positions count.
        block_pairs: (block of the student, block of the teacher), each from 0. The outputs of both
            are brought together: `hidden_state_loss` of each pair, their mean times
            `hidden_weight`, is added to the loss.
        chunk_size: most rows of logits at a time. None: 32 MiB of them, 128 on a GPU.
    Raises ValueError for options outside their bounds; for models that are no causal LMs, are the
    same, have vocabularies of different sizes, or (with pairs) hidden states of different widths;
    for a student that has a teacher, is quantized, has no parameter that trains, or computes its
    loss itself; and for an output layer with adapters or in few bits. The forward of the student
    raises it for logits that are more than a linear layer, the factor and the soft cap of the
    configuration, for a teacher on another device, and for `inputs_embeds`.
    """
    require_causal_lm(student)
    require_causal_lm(teacher)
    check_options(temperature, teacher_share, chunk_size)
    check_number(least=0, hidden_weight=hidden_weight)
    causal = without_adapters(student)
    if isinstance(causal, Taught):
        raise ValueError("this student has a teacher: call remove_distillation(student) first")
    check_models(causal, without_adapters(teacher))
    pairs = checked_pairs(student, teacher, block_pairs)
    require_plain_loss(causal)

    loss = partial(
        _loss_of_a_step,
        temperature=temperature,
        teacher_share=teacher_share,
        hidden_weight=hidden_weight,
        chunk_size=chunk_size,
    )
    of_student = tuple(ours for ours, _ in pairs)
    of_teacher = tuple(theirs for _, theirs in pairs)
    mix_in(causal, Taught, teaching=Teaching(teacher, loss, of_student, of_teacher))
    causal.loss_function = PlainLoss()
    return student


def remove_distillation(student: Any) -> Any:
    """Give the student its own class back. Raises ValueError if there is nothing to remove."""
    causal = without_adapters(student)
    if not isinstance(causal, Taught):
        raise ValueError("this model has no teacher that apply_distillation() has given it")
    unmix(causal, Taught, attributes=["teaching"])
    del causal._loss_function  # from here on transformers finds the usual one again
    return student


def distillation_loss(
    hidden: torch.Tensor,
    layer: OutputLayer,
    teacher_hidden: torch.Tensor,
    teacher_layer: OutputLayer,
    labels: torch.Tensor,
    *,
    temperature: float = 1.0,
    teacher_share: float = 0.5,
    chunk_size: int | None = None,
    ignore_index: int = -100,
    num_items: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """`plain_distillation_loss` of two models, from what their output layers read.

    Args:
        hidden: [..., D]; teacher_hidden: [..., E]; labels: [...], shifted: what each position has
            to predict. Positions with `ignore_index` count in neither loss.
        layer: OutputLayer(weight [V, D], bias [V] or None, soft cap or None); teacher_layer: the
            same with E. The teacher's get no gradients.
        num_items: divides the sum, instead of the number of targets: that of the whole batch, when
            `labels` are those of one micro-batch.
    Returns the mean in fp32 or fp64. Backward runs once. Raises ValueError for wrong options,
    shapes and labels, and for a mean over no target.
    """
    check_options(temperature, teacher_share, chunk_size)
    check_whole(ignore_index=ignore_index, least=-(2**63))
    check_shapes(hidden, layer, teacher_hidden, teacher_layer, labels)
    rows = rows_with_a_target(labels, ignore_index)  # [N]
    targets = labels.flatten()[rows]  # [N]
    check_labels(targets, len(layer.weight), ignore_index)
    plan = plan_chunks(
        hidden, layer.weight, teacher_hidden, teacher_layer.weight, chunk_size=chunk_size
    )
    training = torch.is_grad_enabled()  # inside a Function it is always off
    # The plan knows the dtype of each product: autocast would choose another one.
    with torch.autocast(hidden.device.type, enabled=False):
        return ChunkedDistillation.apply(
            hidden.reshape(-1, hidden.shape[-1]),  # [T, D]
            *layer,
            teacher_hidden.detach().reshape(-1, teacher_hidden.shape[-1]),  # [T, E]
            OutputLayer(*map(_detached, teacher_layer)),
            rows,
            targets,
            divisor_of_mean(len(rows), num_items),
            Mixture(temperature, teacher_share),
            plan,
            training,
        )


def _loss_of_a_step(
    student: Ran,
    teacher: Ran,
    targets: torch.Tensor,
    *,
    num_items: int | torch.Tensor | None,
    ignore_index: int,
    hidden_weight: float,
    **options: Any,
) -> torch.Tensor:
    """The loss of what both models did on a batch with these targets [B, S]."""
    loss = distillation_loss(
        student.hidden,
        student.layer,
        teacher.hidden,
        teacher.layer,
        targets,
        num_items=num_items,
        ignore_index=ignore_index,
        **options,
    )
    if not student.after_blocks:
        return loss
    rows = rows_with_a_target(targets, ignore_index)
    divisor = divisor_of_mean(len(rows), num_items)
    of_pairs = [
        hidden_state_loss(ours, theirs, rows, divisor=divisor)
        for ours, theirs in zip(student.after_blocks, teacher.after_blocks)
    ]
    return loss + hidden_weight * torch.stack(of_pairs).mean()


def _detached(value: Any) -> Any:
    """A tensor without its graph; anything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    return value


# --- Hugging Face glue and guards -----------------------------------------------------------------


def require_same_tokens(tokenizer: Any, teacher_tokenizer: Any) -> None:
    """Raise ValueError unless both tokenizers give every token the same number.

    The models alone cannot show it: two vocabularies of one size may hold other tokens, and the
    student would learn the teacher's distribution over the wrong ones.
    """
    for given in (tokenizer, teacher_tokenizer):
        if not hasattr(given, "get_vocab"):
            raise ValueError(
                f"{type(given).__name__} is no tokenizer: give two, such as "
                f"AutoTokenizer.from_pretrained(…) returns"
            )
    ours = tokenizer.get_vocab()
    theirs = teacher_tokenizer.get_vocab()
    different = [token for token in ours if theirs.get(token) != ours[token]]
    different += [token for token in theirs if token not in ours]
    if different:
        raise ValueError(
            f"the tokenizers differ in {len(different):,} tokens, such as {different[0]!r}: "
            f"logit distillation needs a teacher with the student's tokens"
        )


# --- the arithmetic -------------------------------------------------------------------------------


@estimate(Order.LOSS)
def estimate_distillation(
    budget: Budget,
    model: Any,
    shape: Shape,
    *,
    teacher: Any,
    block_pairs: int = 0,
    chunk_size: int | None = None,
    targets: int | None = None,
    dtype: torch.dtype | None = None,
) -> Budget:
    """The budget of a student `model` with a teacher.

    Args:
        block_pairs: how many pairs of blocks are compared.
        targets: tokens of a micro-batch that have a label. None: all but the first of each row.
        dtype: of autocast, as in `estimate_mixed_precision`; None if this is called inside of it,
            or if there is none.
    It is assumed that the teacher's forward, which keeps nothing, needs less than the student's
    backward. Raises ValueError for a wrong chunk size, and if no token has a label.
    """
    check_options(1.0, 1.0, chunk_size)
    check_whole(least=0, block_pairs=block_pairs)
    targets = planned_targets(shape, targets)
    head = head_of(model)
    teacher_head = head_of(teacher)
    with planned_autocast(head, dtype):
        plan = plan_chunks(head, head, teacher_head, teacher_head, chunk_size=chunk_size)

    weight_gradient = 0
    if head_trains(budget, model):
        weight_gradient = head.numel() * plan.sums.itemsize
    of_pairs = block_pairs * pair_bytes(model, teacher, shape, targets)
    teacher_hidden = shape.tokens * teacher_head.shape[1] * teacher.dtype.itemsize
    in_last_chunk = hidden_bytes(budget, model, shape) + teacher_hidden
    in_last_chunk += _chunk_bytes(budget, model, teacher, plan, targets)
    in_last_block = last_block_bytes(budget, model, shape)
    return budget.change(
        weights=budget.weights + weight_bytes(teacher),
        loss=weight_gradient + of_pairs + max(in_last_chunk, in_last_block),
    )


def _chunk_bytes(
    budget: Budget, model: Any, teacher: Any, plan: TwoTablesPlan, targets: int
) -> int:
    """What is alive at the largest moment of one chunk, beside the gradients."""
    head = head_of(model)
    vocabulary, width = head.shape
    rows = min(plan.rows, targets)
    size = plan.products.itemsize
    tables = rows * vocabulary * (size + plan.teacher_products.itemsize)
    # Of this chunk; and beside them their gradient, or those of the chunk before.
    inputs = 2 * rows * width * size

    copies = 0
    for weight, products in ((head, plan.products), (head_of(teacher), plan.teacher_products)):
        if weight.dtype != products:
            copies += weight.numel() * products.itemsize
    # In fp32, of a block: log q, log p and p of the two losses' four tables; and of 16 bits a copy.
    of_a_block = 4 * min(rows, plan.block_rows) * vocabulary
    between_products = 4 * of_a_block
    if size == 2:
        between_products += of_a_block
    in_products = 0
    if head_trains(budget, model) and plan.products != plan.sums:
        in_products = head.numel() * size  # the chunk's part of the weight's gradient
    return tables + inputs + copies + max(between_products, in_products)
