"""Which parts stay: the numbers of blocks, channels and heads, chosen and checked.

Part of student. Numbers count from 0 and are in rising order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from recipes_lib.core.checks import check_several, check_whole


def largest(importance: Sequence[torch.Tensor], *, keep: int, made_by: str) -> list[torch.Tensor]:
    """For each block the numbers of the `keep` largest entries of its importance, in rising order.

    Raises ValueError for importance that is no list of vectors, as `made_by` makes it, and for
    `keep` outside 1 … number of entries.
    """
    check_several(importance=importance)
    if len(importance) == 0 or not all(_is_vector(of_block) for of_block in importance):
        raise ValueError(
            f"importance is no list of vectors, one for each block: give what "
            f"{made_by}(model, batches) returns"
        )
    check_whole(keep=keep, most=min(len(of_block) for of_block in importance))
    return [of_block.topk(keep).indices.sort().values for of_block in importance]


def _is_vector(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1


def checked_numbers(*, below: int, **given: Any) -> list[int]:
    """The numbers as a list. Raises ValueError unless they are 0 … below - 1, in rising order."""
    check_several(**given)
    name, value = next(iter(given.items()))
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    numbers = list(value)
    whole = all(isinstance(number, int) for number in numbers)
    rising = whole and all(first < second for first, second in pairwise(numbers))
    if not numbers or not rising or numbers[0] < 0 or numbers[-1] >= below:
        raise ValueError(
            f"{name}={numbers[:8]}: give whole numbers from 0 to {below - 1} in rising order"
        )
    return numbers


def checked_parts(available: Sequence[int], **given: Any) -> list[torch.Tensor]:
    """For each block of the teacher, of which each has `available` parts, those to keep.

    Raises ValueError unless every block keeps as many, and all of them exist.
    """
    check_several(**given)
    name, parts = next(iter(given.items()))
    for number, kept in enumerate(parts):
        check_several(**{f"{name}[{number}]": kept})
    if len(parts) != len(available) or len({len(kept) for kept in parts}) != 1:
        raise ValueError(
            f"{name} are {[len(kept) for kept in parts]} for {len(available)} blocks: "
            f"give each block of the teacher equally many"
        )
    checked = []
    for number, (kept, below) in enumerate(zip(parts, available)):
        listed = checked_numbers(below=below, **{f"{name}[{number}]": kept})
        checked.append(torch.tensor(listed))
    return checked
