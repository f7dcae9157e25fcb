"""What one rank of a pipeline keeps, by the order of its actions and by its stages.

PyTorch's schedules keep more than the activations of waiting forwards: buffers for all messages of
a step, and messages that were sent until somebody waits for them.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from recipes_lib.core.model.causal_lm import decoder_blocks, without_adapters
from recipes_lib.core.model.sizes import tensor_bytes
from recipes_lib.core.ranks.pipeline_grid import FORWARD, Action


def most_kept(order: list[Action], schedule: str, stages: int, of_stage: int, message: int) -> int:
    """The most bytes that forwards of one rank keep for their backwards, with what has been sent.

    The input of a stage is in the buffer of a message, which is counted elsewhere. Its output is
    kept until backward. Beside that PyTorch keeps sent messages until it waits for them: GPipe for
    gradients at the end of the step, the interleaved schedule for all of them there.
    """
    kept = 0
    most = 0
    for action in order:
        receives = action.stage > 0
        sends = action.stage < stages - 1
        if action.direction == FORWARD:
            kept += of_stage
            if receives:
                kept -= message
            if sends:
                kept += message
        else:
            kept -= of_stage
            if receives:
                kept += message
            if sends and schedule != "interleaved":
                kept -= message
            if receives and schedule != "1f1b":
                kept += message  # the gradient that went back
        most = max(most, kept)
    return most


def own_share(model: Any, ranks: int, rank: int, *, trained_only: bool) -> float:
    """The part of the model's bytes that one rank holds; a tied weight is held by two ranks."""
    causal = without_adapters(model)
    blocks = _bytes_of(decoder_blocks(model), trained_only)
    first = _bytes_of(causal.get_input_embeddings(), trained_only)
    last = _bytes_of(causal.get_output_embeddings(), trained_only)
    whole = _bytes_of(model, trained_only)
    own = blocks / ranks
    if rank == 0:
        own += first
    if rank == ranks - 1:
        # All that is neither a block nor the embedding: the norm, and an untied output layer.
        own += whole - blocks - first
        tied = causal.get_input_embeddings().weight is causal.get_output_embeddings().weight
        if tied and ranks > 1:
            own += last
    return own / max(whole, 1)


def _bytes_of(module: nn.Module, trained_only: bool) -> int:
    total = 0
    for parameter in module.parameters():
        if parameter.requires_grad or not trained_only:
            total += tensor_bytes(parameter)
    return total


def table_copy(model: Any, ranks: int, rank: int) -> int:
    """The gradient of a table [V, D] by one micro-batch, before it is added to the others."""
    causal = without_adapters(model)
    tables = []
    if rank == 0:
        tables.append(causal.get_input_embeddings().weight)
    if rank == ranks - 1:
        tables.append(causal.get_output_embeddings().weight)
    return max([tensor_bytes(table) for table in tables if table.requires_grad], default=0)
