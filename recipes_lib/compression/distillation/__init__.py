"""Knowledge distillation: a small model learns all that a large one says about the next token.

Problem    A small model that trains on text learns one token per position. What else could stand
           there, and how likely it is, the text does not say. A larger model that is trained
           already does say it, in the whole distribution over the vocabulary.
Idea       Train the student on two losses, with p the softmax of the teacher's logits over a
           temperature t, and q that of the student's:

               loss = w t² KL(p ‖ q)  +  (1 - w) cross-entropy with the text

           The gradient of a softmax over t is smaller by t, and so is the difference of p and q:
           t² makes up for both, and w keeps its meaning at any temperature.

           Two models make two tables of logits [T, V]. The gradient of the student's logits is
           known chunk by chunk, so no table is ever whole (`loss_in_chunks`).
Saves      Seven tables of 4 T V bytes become two of 4 C V for chunks of C tokens, and blocks
           between the products. The gradient of the output layer remains: 4 V D bytes.
Costs      A forward of the teacher in every step, and its weights. 16-bit weights of the output
           layers are copied to fp32 on a CPU without bf16 units.
Use when   A student is to replace a trained model that is too slow or too large, and both have the
           same tokens (`require_same_tokens`). After parts were cut away: see `student`.
Not when   The teacher is hardly better than the student, or the text is not what the teacher is
           good at: then the text itself is the better teacher. A loss with a router's part. Inputs
           that are embeddings of the student.
In production   NVIDIA Model Optimizer `modelopt.torch.distill` (after its Minitron pruning);
           TRL `trl.experimental.gkd.GKDTrainer`, also on the student's own answers, and with
           `use_liger_kernel` chunk by chunk; Liger `LigerFusedLinearJSDLoss`; torchtune
           `ForwardKLWithChunkedOutputLoss`, which makes the logits and chunks what follows.
Source     Hinton et al., "Distilling the Knowledge in a Neural Network", arXiv 1503.02531;
           hidden states: Sanh et al., "DistilBERT", arXiv 1910.01108; Muralidharan et al.,
           "Compact Language Models via Pruning and Knowledge Distillation", arXiv 2407.14679.

Shapes: T tokens, N of them with a target, D hidden of the student, V vocabulary, B batch,
S sequence.

loss_in_chunks  the loss of two models from what their output layers read, chunk by chunk
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes_lib.compression.distillation.loss_in_chunks import distillation_loss
from recipes_lib.core.data.tokens_and_labels import IGNORED
from recipes_lib.core.model.causal_lm import decoder_blocks, require_causal_lm, without_adapters
from recipes_lib.core.model.chunked_loss import divisor_of_mean, rows_with_a_target
from recipes_lib.core.model.evaluating import evaluating
from recipes_lib.core.model.marks import QUANTIZED_BY, marked
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

__all__ = ["apply_distillation", "distillation_loss"]

# --- the idea: what a learner can copy ------------------------------------------------------------


def plain_distillation_loss(
    logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor,
    *,
    temperature: float,
    teacher_share: float,
) -> Tensor:
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


@proves("changes")
def apply_distillation(
    student: Any,
    teacher: Any,
    *,
    temperature: float = 1.0,
    teacher_share: float = 0.5,
    block_pairs: Iterable[tuple[int, int]] = (),
    hidden_weight: float = 1.0,
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
    """
    require_causal_lm(teacher)
    _check_output_layers(without_adapters(student), without_adapters(teacher))
    pairs = list(block_pairs)
    options = {"temperature": temperature, "teacher_share": teacher_share}
    causal = without_adapters(student)
    _require_plain_loss(causal)
    mix_in(causal, Taught, teaching=Teaching(teacher, pairs, hidden_weight, options))
    causal.loss_function = PlainLoss()
    return student


@dataclass(frozen=True)
class Teaching:
    """How a student is taught. A copy of the student has the same teacher, not a copy of it."""

    teacher: Any
    pairs: list[tuple[int, int]]  # numbers of blocks whose outputs are compared
    hidden_weight: float
    options: dict[str, Any]  # of `distillation_loss`

    def __deepcopy__(self, memo: dict[int, Any]) -> Teaching:
        return self


class Taught:
    """What is mixed into the class of a student: in training, its loss has a teacher.

    `take_out(student, Taught)` gives it its own loss back.

    Both models run up to their output layers:

        teacher   hidden [B, S, E]   first, without gradients: what it computes with is free again
        student   hidden [B, S, D]   before the student begins to keep activations for backward
    """

    teaching: Teaching

    def taken_out(self) -> None:
        del self._loss_function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """A student's forward: with labels in training mode it is taught, and returns no logits."""
        kwargs = options_by_name(super().forward, args, kwargs)
        if kwargs.get("labels") is None or not self.training:
            return super().forward(**kwargs)
        teaching = self.teaching
        teacher = without_adapters(teaching.teacher)
        inputs = {name: value for name, value in kwargs.items() if name not in OF_THE_LOSS}
        inputs["return_dict"] = True
        with evaluating(teacher):
            run_teacher = partial(teacher, **inputs | {"use_cache": False})
            taught_by = _run_to_hidden(
                teacher, run_teacher, [theirs for _, theirs in teaching.pairs]
            )
        run_student = partial(super().forward, **inputs)
        student = _run_to_hidden(self, run_student, [ours for ours, _ in teaching.pairs])
        if "aux_loss" in student.output:
            raise ValueError(
                f"{type(self).__name__} adds a router's loss, which distillation would leave out: "
                f"train it on its own loss, or with output_router_logits=False"
            )
        loss = _loss_of_student(student, taught_by, teaching, kwargs)
        return with_loss(self, student.output, loss, kwargs)


# Options of a forward that are about its loss. The teacher has none.
OF_THE_LOSS = ("labels", "shift_labels", "num_items_in_batch", "ignore_index")


@dataclass(frozen=True)
class Ran:
    """What teacher or student did on a batch, as far as a loss on hidden states needs it."""

    output: Any  # of the model's forward; its logits are those of two tokens
    hidden: Tensor  # [B, S, D], what the output layer would have read
    after_blocks: list[Tensor]  # [B, S, D] each, what the chosen blocks returned
    layer: OutputLayer


def _run_to_hidden(causal: Any, forward: Callable[[], Any], blocks: Iterable[int]) -> Ran:
    """Run teacher or student up to the output layer, and keep what the `blocks` returned."""
    kept: dict[int, Tensor] = {}

    def keep_hidden(number: int, _block: nn.Module, _inputs: Any, output: Any) -> None:
        kept[number] = output[0] if isinstance(output, tuple) else output

    with contextlib.ExitStack() as stack:
        for number in blocks:
            block = decoder_blocks(causal)[number]
            stack.enter_context(block.register_forward_hook(partial(keep_hidden, number)))
        output, hidden = run_to_the_output_layer(causal, forward)
    layer = output_layer_of(causal)
    if not makes_plain_logits(output, hidden, layer):
        raise ValueError(
            f"{type(causal).__name__} changes its logits behind its output layer, and the loss of "
            f"distillation would not: give models whose logits come straight from that layer"
        )
    return Ran(output, hidden, [kept[number] for number in blocks], layer)


def _loss_of_student(student: Ran, teacher: Ran, teaching: Teaching, kwargs: dict) -> Tensor:
    """The loss of a student on a batch: that of the logits, and that of the paired blocks."""
    targets = targets_of(kwargs).to(student.hidden.device)  # [B, S]
    ignored = kwargs.get("ignore_index", IGNORED)
    num_items = kwargs.get("num_items_in_batch")
    loss = distillation_loss(
        student.hidden,
        student.layer,
        teacher.hidden,
        teacher.layer,
        targets,
        num_items=num_items,
        ignore_index=ignored,
        **teaching.options,
    )
    if not teaching.pairs:
        return loss
    rows = rows_with_a_target(targets, ignored)
    divisor = divisor_of_mean(len(rows), num_items)
    of_pairs = [
        hidden_state_loss(ours, theirs, rows, divisor=divisor)
        for ours, theirs in zip(student.after_blocks, teacher.after_blocks)
    ]
    return loss + teaching.hidden_weight * torch.stack(of_pairs).mean()


def hidden_state_loss(
    hidden: Tensor, teacher_hidden: Tensor, rows: Tensor, *, divisor: Tensor
) -> Tensor:
    """How far a student's hidden [..., D] is from teacher_hidden, in the `rows` [N] that count.

    Of one position: the squared distance over the squared length of the teacher's. So each counts
    the same. The first tokens of a text often have hidden states hundreds of times as long as the
    others; in a mean of squared distances there would be nothing else.
    """
    ours = hidden.reshape(-1, hidden.shape[-1])[rows].float()  # [N, D]
    theirs = teacher_hidden.detach().reshape(-1, teacher_hidden.shape[-1])[rows].float()  # [N, D]
    length = theirs.square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)  # [N]
    distance = (ours - theirs).square().sum(-1)  # [N]
    return (distance / length).sum() / divisor


class PlainLoss:
    """The loss of a student in eval mode: the usual one, as an object of its own.

    A technique that replaces the usual loss sees that this is another one, and refuses. Otherwise
    it would take the labels away, and the student would train without its teacher.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        from transformers.loss.loss_utils import ForCausalLMLoss

        return ForCausalLMLoss(*args, **kwargs)


# --- guards ---------------------------------------------------------------------------------------


def require_same_tokens(tokenizer: Any, teacher_tokenizer: Any) -> None:
    """Raise ValueError unless the tokenizers of teacher and student number all tokens alike."""
    different = set(tokenizer.get_vocab().items()) ^ set(teacher_tokenizer.get_vocab().items())
    if different:
        tokens = sorted({token for token, _ in different})
        raise ValueError(
            f"the tokenizers differ in {len(tokens):,} tokens, such as {tokens[0]!r}: "
            f"logit distillation needs a teacher with the student's tokens"
        )


def _check_output_layers(student: Any, teacher: Any) -> None:
    """Raise ValueError unless teacher and student have plain output layers, over equal tokens."""
    for model in (student, teacher):
        head = model.get_output_embeddings()
        if marked(head, QUANTIZED_BY) or beside_weight_and_bias(head):
            raise ValueError(
                f"the output layer of {type(model).__name__} has adapters or is quantized: "
                f"distillation multiplies with its plain weight; leave that layer as it was"
            )
    sizes = [len(model.get_output_embeddings().weight) for model in (student, teacher)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the student has a vocabulary of {sizes[0]:,} tokens and the teacher one of "
            f"{sizes[1]:,}: give models with the same tokens; where only unused rows at the end "
            f"differ, teacher.resize_token_embeddings({sizes[0]}) cuts or adds them"
        )


def _require_plain_loss(causal: Any) -> None:
    """Raise ValueError unless the student leaves its loss to `self.loss_function`."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    names_in_forward = inspect.unwrap(type(causal).forward).__code__.co_names
    if "loss_function" in names_in_forward and causal.loss_function is ForCausalLMLoss:
        return
    raise ValueError(
        f"{type(causal).__name__} computes its loss itself: "
        f"only the loss of a model that uses ForCausalLMLoss can be replaced"
    )
