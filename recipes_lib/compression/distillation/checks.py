"""What student and teacher must have in common before one learns from the other.

Part of distillation: guards, each of which raises ValueError and changes nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from recipes_lib.compression.distillation.hf import require_plain_head
from recipes_lib.core.checks import check_number, check_whole
from recipes_lib.core.model.linears import refuse_quantized
from recipes_lib.core.model.output_layer import OutputLayer
from recipes_lib.core.predict.plain_step import head_of


def check_options(temperature: float, teacher_share: float, chunk_size: int | None) -> None:
    """Raise ValueError for options outside their bounds, which `apply_distillation` names."""
    check_number(above=0, temperature=temperature)
    check_number(above=0, teacher_share=teacher_share)
    if teacher_share > 1:
        raise ValueError(f"teacher_share={teacher_share!r}: give a number above 0 and up to 1")
    if chunk_size is not None:
        check_whole(chunk_size=chunk_size)


def check_models(student: Any, teacher: Any) -> None:
    """Raise ValueError for two causal LMs that cannot be student and teacher."""
    if student is teacher:
        raise ValueError("student and teacher are the same model: give two, such as make_student's")
    refuse_quantized(
        student,
        way_out="its layers do not train; let the student learn first, and quantize it afterwards",
    )
    if not any(parameter.requires_grad for parameter in student.parameters()):
        raise ValueError("no parameter of the student trains: call student.requires_grad_(True)")
    for model in (student, teacher):
        require_plain_head(model)
    ours = len(head_of(student))
    theirs = len(head_of(teacher))
    if ours != theirs:
        raise ValueError(
            f"the student has a vocabulary of {ours:,} tokens and the teacher one of {theirs:,}: "
            f"give models with the same tokens; where only unused rows at the end differ, "
            f"teacher.resize_token_embeddings({ours}) cuts or adds them"
        )


def check_shapes(
    hidden: torch.Tensor,
    layer: OutputLayer,
    teacher_hidden: torch.Tensor,
    teacher_layer: OutputLayer,
    labels: torch.Tensor,
) -> None:
    """Raise ValueError unless the shapes fit each other and both vocabularies are as large.

    All are tensors on one device, the layers hold tensors, and labels are whole numbers.
    """
    for name, its_layer in (("layer", layer), ("teacher_layer", teacher_layer)):
        if not isinstance(its_layer, OutputLayer):
            raise ValueError(
                f"{name} is of type {type(its_layer).__name__}: give "
                f"OutputLayer(weight [V, D], bias [V] or None, soft cap or None)"
            )
    _check_tensors(hidden=hidden, teacher_hidden=teacher_hidden, labels=labels)
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"labels are {labels.dtype}: give token ids as whole numbers")
    fits = len(layer.weight) == len(teacher_layer.weight)
    for states, its_layer in ((hidden, layer), (teacher_hidden, teacher_layer)):
        weight = its_layer.weight
        fits = fits and weight.dim() == 2 and states.shape == (*labels.shape, weight.shape[1])
        if its_layer.bias is not None:
            fits = fits and its_layer.bias.shape == weight.shape[:1]
    if not fits:
        tensors = (hidden, layer.weight, teacher_hidden, teacher_layer.weight, labels)
        raise ValueError(
            f"shapes of hidden, weight, teacher's hidden, teacher's weight, labels: "
            f"{[tuple(tensor.shape) for tensor in tensors]} are not "
            f"[..., D], [V, D], [..., E], [V, E], [...]"
        )


def _check_tensors(**given: Any) -> None:
    for name, value in given.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{name} is of type {type(value).__name__}: give a tensor")
    devices = {str(value.device) for value in given.values()}
    if len(devices) > 1:
        raise ValueError(
            f"{', '.join(given)} are on {' and '.join(sorted(devices))}: move them to one device"
        )
