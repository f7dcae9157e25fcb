"""The glue between a distillation loss and two Hugging Face causal LMs.

Part of distillation. Both models run up to their output layers, as `core.output_layer` describes:

    teacher   hidden [B, S, E]   first, without gradients: what it computes with is free again
    student   hidden [B, S, D]   before the student begins to keep activations for backward

The loss gets the hidden states and the weights of both output layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from recipes_lib.core.data.chat import IGNORED
from recipes_lib.core.data.evaluation import evaluating
from recipes_lib.core.model.causal_lm import decoder_blocks, without_adapters
from recipes_lib.core.model.marks import QUANTIZED_BY, marked
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

# Options of a forward that are about its loss. The teacher has none.
OF_THE_LOSS = ("labels", "shift_labels", "num_items_in_batch", "ignore_index")


@dataclass(frozen=True)
class Ran:
    """What a model did on a batch, as far as a loss on hidden states needs it."""

    output: Any  # of the model's forward; its logits are those of two tokens
    hidden: torch.Tensor  # [B, S, D], what the output layer would have read
    after_blocks: list[torch.Tensor]  # [B, S, D] each, what the chosen blocks returned
    layer: OutputLayer


@dataclass(frozen=True)
class Teaching:
    """How a student is taught. A copy of the student has the same teacher, not a copy of it."""

    teacher: Any
    loss: Callable[..., torch.Tensor]  # of two `Ran` and the targets [B, S]
    of_student: tuple[int, ...]  # numbers of blocks whose outputs the loss compares ...
    of_teacher: tuple[int, ...]  # ... with those of these

    def __deepcopy__(self, memo: dict[int, Any]) -> Teaching:
        return self


class PlainLoss:
    """The loss of a student in eval mode: the usual one, as an object of its own.

    A technique that replaces the usual loss sees that this is another one, and refuses. Otherwise
    it would take the labels away, and the student would train without its teacher.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        from transformers.loss.loss_utils import ForCausalLMLoss

        return ForCausalLMLoss(*args, **kwargs)


class Taught:
    """What is mixed into the class of a student: in training, its loss has a teacher."""

    teaching: Teaching

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As ever; but with labels in training mode the output has no logits."""
        kwargs = options_by_name(super().forward, args, kwargs)
        if kwargs.get("labels") is None or not self.training:
            return super().forward(**kwargs)
        _check_inputs(kwargs)
        teaching = self.teaching
        teacher = without_adapters(teaching.teacher)
        _check_device(self, teacher)

        inputs = {name: value for name, value in kwargs.items() if name not in OF_THE_LOSS}
        inputs["return_dict"] = True
        with evaluating(teacher):
            run_teacher = partial(teacher, **inputs | {"use_cache": False})
            taught_by = run_keeping_blocks(teacher, run_teacher, teaching.of_teacher)
        run_student = partial(super().forward, **inputs)
        student = run_keeping_blocks(self, run_student, teaching.of_student)
        if "aux_loss" in student.output:
            raise ValueError(
                f"{type(self).__name__} adds a router's loss, which distillation would leave out: "
                f"call remove_distillation(student) and train on its own loss"
            )

        loss = teaching.loss(
            student,
            taught_by,
            targets_of(kwargs).to(student.hidden.device),
            num_items=kwargs.get("num_items_in_batch"),
            ignore_index=kwargs.get("ignore_index", IGNORED),
        )
        return with_loss(self, student.output, loss, kwargs)


# --- what a model did on a batch ------------------------------------------------------------------


def run_keeping_blocks(causal: Any, forward: Callable[[], Any], blocks: Iterable[int] = ()) -> Ran:
    """Run `forward` of a causal LM up to its output layer, and keep what the `blocks` returned.

    Raises ValueError if the model makes its logits otherwise than `OutputLayer` says.
    """
    kept: dict[int, torch.Tensor] = {}

    def keep(number: int, _block: nn.Module, _inputs: Any, output: Any) -> None:
        kept[number] = output
        if isinstance(output, tuple):
            kept[number] = output[0]

    with contextlib.ExitStack() as stack:
        for number in blocks:
            block = decoder_blocks(causal)[number]
            stack.enter_context(block.register_forward_hook(partial(keep, number)))
        output, hidden = run_to_the_output_layer(causal, forward)
    layer = output_layer_of(causal)
    if not makes_plain_logits(output, hidden, layer):
        raise ValueError(
            f"{type(causal).__name__} changes its logits behind its output layer, and the loss of "
            f"distillation would not: give models whose logits come straight from their output "
            f"layer"
        )
    return Ran(output, hidden, [kept[number] for number in blocks], layer)


# --- guards ---------------------------------------------------------------------------------------


def require_plain_head(causal: Any) -> None:
    """Raise ValueError if the output layer is more than a weight and a bias, or is quantized."""
    head = causal.get_output_embeddings()
    quantized = marked(head, QUANTIZED_BY)
    if quantized or beside_weight_and_bias(head) or not head.weight.is_floating_point():
        raise ValueError(
            f"the output layer of {type(causal).__name__} has adapters or is quantized: "
            f"distillation multiplies with its plain weight; leave that layer as it was"
        )


def _check_inputs(kwargs: dict[str, Any]) -> None:
    """Raise ValueError for inputs that mean nothing to the teacher."""
    for name in ("inputs_embeds", "past_key_values"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{name} belongs to the student, and the teacher cannot read it: give input_ids"
            )


def _check_device(student: Any, teacher: Any) -> None:
    if student.device != teacher.device:
        raise ValueError(
            f"the student is on {student.device} and its teacher on {teacher.device}: "
            f"move the teacher, for instance by teacher.to({str(student.device)!r})"
        )
