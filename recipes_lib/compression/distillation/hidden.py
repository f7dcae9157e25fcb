"""Hidden states of student and teacher, brought together block by block.

Part of distillation. Logits say what a model answers, hidden states how it came there. A pair is
(block of the student, block of the teacher), and their outputs are compared at each position:

    loss of a pair = mean over the positions of |h - h'|² / |h'|²        h' the teacher's

Shapes: N positions that count, D hidden, B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from recipes_lib.core.checks import check_several, check_whole
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.core.predict.budget import Shape
from recipes_lib.core.predict.plain_step import head_of


def hidden_state_loss(
    hidden: torch.Tensor,
    teacher_hidden: torch.Tensor,
    rows: torch.Tensor,
    *,
    divisor: torch.Tensor,
) -> torch.Tensor:
    """How far hidden [..., D] is from teacher_hidden [..., D], in the `rows` [N] that count.

    Of one position: the squared distance over the squared length of the teacher's. So each counts
    the same. The first tokens of a text often have hidden states hundreds of times as long as the
    others; in a mean of squared distances there would be nothing else.

    Raises ValueError for hidden states of different shapes.
    """
    if hidden.shape != teacher_hidden.shape:
        raise ValueError(
            f"hidden states {list(hidden.shape)} of the student, {list(teacher_hidden.shape)} of "
            f"the teacher: give models of the same width"
        )
    ours = hidden.reshape(-1, hidden.shape[-1])[rows].float()  # [N, D]
    theirs = teacher_hidden.detach().reshape(-1, teacher_hidden.shape[-1])[rows].float()  # [N, D]
    length = theirs.square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)  # [N]
    distance = (ours - theirs).square().sum(-1)  # [N]
    return (distance / length).sum() / divisor


def checked_pairs(
    student: Any, teacher: Any, block_pairs: Iterable[tuple[int, int]]
) -> list[tuple[int, int]]:
    """The pairs as a list. Raises ValueError for blocks that do not exist, or do not fit."""
    check_several(block_pairs=block_pairs)
    pairs = list(block_pairs)
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(
                f"block_pairs holds {pair!r}: give pairs (block of the student, block of the "
                f"teacher), such as [(0, 1)]"
            )
        ours, theirs = pair
        check_whole(least=0, most=len(decoder_blocks(student)) - 1, block_of_student=ours)
        check_whole(least=0, most=len(decoder_blocks(teacher)) - 1, block_of_teacher=theirs)
    widths = [head_of(model).shape[1] for model in (student, teacher)]
    if pairs and widths[0] != widths[1]:
        raise ValueError(
            f"hidden states of the widths {widths[0]} and {widths[1]} cannot be compared: "
            f"leave block_pairs out, or give a student of the teacher's width"
        )
    return pairs


def pair_bytes(model: Any, teacher: Any, shape: Shape, targets: int) -> int:
    """Of a pair: the teacher's hidden states, and the differences that backward needs, in fp32."""
    width = head_of(model).shape[1]
    of_teacher = shape.tokens * width * teacher.dtype.itemsize
    return of_teacher + 4 * targets * width
