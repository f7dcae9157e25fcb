"""The glue between a distillation loss and two Hugging Face causal LMs.

Part of distillation. Both models run as ever, up to their output layers:

    teacher   hidden [B, S, E]   first, without gradients: what it computes with is free again
    student   hidden [B, S, D]   before the student begins to keep activations for backward

The output layers run on two tokens only. Their logits show whether a model makes its logits as the
loss does: see `two_tokens`. The loss gets the hidden states and the weights of both output layers.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from recipes_lib.compression.distillation_autograd import OutputLayer
from recipes_lib.core.causal_lm import decoder_blocks, final_softcap, without_adapters
from recipes_lib.core.chat import IGNORED
from recipes_lib.core.evaluation import evaluating
from recipes_lib.core.measure import dry

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
        if kwargs.get("labels") is None or not self.training:
            return super().forward(*args, **kwargs)
        _check_inputs(kwargs)
        teaching = self.teaching
        teacher = without_adapters(teaching.teacher)
        _check_device(self, teacher)

        inputs = {name: value for name, value in kwargs.items() if name not in OF_THE_LOSS}
        inputs["return_dict"] = True
        with evaluating(teacher):
            run_teacher = partial(teacher, *args, **inputs | {"use_cache": False})
            taught_by = run_to_the_output_layer(teacher, run_teacher, teaching.of_teacher)
        run_student = partial(super().forward, *args, **inputs)
        student = run_to_the_output_layer(self, run_student, teaching.of_student)
        if "aux_loss" in student.output:
            raise ValueError(
                f"{type(self).__name__} adds a router's loss, which distillation would leave out: "
                f"call remove_distillation(student) and train on its own loss"
            )

        loss = teaching.loss(
            student,
            taught_by,
            _targets(kwargs).to(student.hidden.device),
            num_items=kwargs.get("num_items_in_batch"),
            ignore_index=kwargs.get("ignore_index", IGNORED),
        )
        output = type(student.output)(**dict(student.output) | {"loss": loss, "logits": None})
        if kwargs.get("return_dict", self.config.return_dict) is False:
            return output.to_tuple()
        return output


def _targets(kwargs: dict[str, Any]) -> torch.Tensor:
    """The token that each position has to predict: [B, S]."""
    targets = kwargs.get("shift_labels")
    if targets is None:
        # The model predicts token t + 1 from token t, and from the last token nothing.
        next_tokens = kwargs["labels"][..., 1:]  # [B, S - 1]
        ignored = kwargs.get("ignore_index", IGNORED)
        targets = nn.functional.pad(next_tokens, (0, 1), value=ignored)  # [B, S]
    return targets


# --- up to the output layer -----------------------------------------------------------------------


def run_to_the_output_layer(
    causal: Any, forward: Callable[[], Any], blocks: Iterable[int] = ()
) -> Ran:
    """Run `forward` of a causal LM, and keep what its output layer and the `blocks` were at.

    Raises ValueError if the model makes its logits otherwise than `OutputLayer` says.
    """
    head = causal.get_output_embeddings()
    layer = OutputLayer(head.weight, getattr(head, "bias", None), final_softcap(causal))
    kept: dict[int, torch.Tensor] = {}
    seen: list[torch.Tensor] = []

    def keep(number: int, _block: nn.Module, _inputs: Any, output: Any) -> None:
        kept[number] = output
        if isinstance(output, tuple):
            kept[number] = output[0]

    with contextlib.ExitStack() as stack:
        for number in blocks:
            block = decoder_blocks(causal)[number]
            stack.enter_context(block.register_forward_hook(partial(keep, number)))
        stack.enter_context(_shortened(head, seen))
        output = forward()
    hidden = seen[0]  # [B, S, D]
    _require_plain_logits(causal, output, hidden, layer)
    return Ran(output, hidden, [kept[number] for number in blocks], layer)


@contextlib.contextmanager
def _shortened(head: nn.Module, seen: list[torch.Tensor]) -> Iterator[None]:
    """Let the output layer run on two tokens of the hidden states, and put all of them in `seen`.

    Autocast is off for that: for two tokens it would copy the weight.
    """
    no_autocast = contextlib.ExitStack()

    def before(head: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        seen.append(inputs[0])  # [B, S, D]
        no_autocast.enter_context(torch.autocast(inputs[0].device.type, enabled=False))
        return two_tokens(inputs[0], head.weight)  # [1, 2, D]: what the output layer sees

    def after(*_: Any) -> None:
        no_autocast.close()

    with head.register_forward_pre_hook(before), head.register_forward_hook(after), no_autocast:
        yield


def two_tokens(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One token of hidden [B, S, D], and 64 times that token: [1, 2, D].

    What a model does with its logits shows in them. A factor (Cohere, Granite) changes the logits
    of both. A soft cap c tanh(logits / c) hardly changes small logits, such as those of an
    untrained model; those of 64 times the token it does change.
    """
    factors = weight.new_tensor([[1.0], [64.0]])  # [2, 1]
    return (hidden[:1, :1] * factors).to(weight.dtype)


def _require_plain_logits(
    causal: Any, output: Any, hidden: torch.Tensor, layer: OutputLayer
) -> None:
    """Raise ValueError if the logits of the two tokens are not what the output layer makes."""
    if dry():  # nothing has a value to compare
        return
    tokens = two_tokens(hidden, layer.weight)  # [1, 2, D]
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        expected = nn.functional.linear(tokens, layer.weight, layer.bias).to(output.logits.dtype)
        if layer.softcap:
            expected = layer.softcap * torch.tanh(expected / layer.softcap)
        # The tolerance is that of bf16. NaN equals NaN: a run that diverges is another problem.
        if torch.allclose(output.logits, expected, rtol=0.02, atol=1e-3, equal_nan=True):
            return
    raise ValueError(
        f"{type(causal).__name__} scales its logits or changes them otherwise, and the loss of "
        f"distillation would not: give models whose logits come straight from their output layer"
    )


# --- guards ---------------------------------------------------------------------------------------


def require_plain_loss(causal: Any) -> None:
    """Raise ValueError unless the model leaves its loss to `self.loss_function`, the usual one."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    names_in_forward = inspect.unwrap(type(causal).forward).__code__.co_names
    if "loss_function" in names_in_forward and causal.loss_function is ForCausalLMLoss:
        return
    raise ValueError(
        f"{type(causal).__name__} computes its loss itself: "
        f"only the loss of a model that uses ForCausalLMLoss can be replaced"
    )


def require_plain_head(causal: Any) -> None:
    """Raise ValueError if the output layer is more than a weight and a bias, or is quantized."""
    head = causal.get_output_embeddings()
    own = {id(head.weight), id(getattr(head, "bias", None))}
    others = [parameter for parameter in head.parameters() if id(parameter) not in own]
    if others or not head.weight.is_floating_point():
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
