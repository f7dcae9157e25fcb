"""The arithmetic of what a rank keeps: predicted bytes of weights, gradients and states."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from recipes_lib.core.model.bytes_of_tensors import parts_needed, trainable_bytes, weight_bytes

STATES = 2  # averages of AdamW for each number that trains


class Kept(NamedTuple):
    """Predicted bytes that a rank has between backward and step, without activations."""

    weights: int
    gradients: int
    states: int

    @property
    def total(self) -> int:
        """All three together."""
        return sum(self)


def kept_whole(model: Any) -> Kept:
    """Predicted bytes of a rank that has all: alone, in data or in context parallelism."""
    gradients = trainable_bytes(model)
    return Kept(weight_bytes(model), gradients, STATES * gradients)


def trained(model: Any) -> list[torch.Tensor]:
    """The parameters whose gradients are predicted."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def part_bytes(parameters: Iterable[torch.Tensor], shards: int) -> int:
    """Predicted bytes of a rank's part of parameters: as many rows of each as the first rank has.

    Ranks that have fewer fill theirs up, and the filling is gathered and sent like the rest.
    """
    total = 0
    for parameter in parameters:
        rows, *others = parameter.shape
        elements = parts_needed(rows, shards) * torch.Size(others).numel()
        total += elements * parameter.element_size()
    return total
