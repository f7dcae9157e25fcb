"""What one rank of a pipeline keeps, and what it sends."""

from __future__ import annotations

from typing import Any

from torch import nn

from recipes_lib.core.model.causal_lm import decoder_blocks, without_adapters
from recipes_lib.core.model.sizes import tensor_bytes
from recipes_lib.parallel._arithmetic import Kept, kept_whole


def predicted_sent_bytes(model: Any, *, rows: int, tokens: int, ranks: int, rank: int) -> int:
    """Bytes that a rank with one stage sends: [B, S, D] over each of its borders, forward and back.

    Together with the gradient of a tied embedding, which the first and the last rank exchange.
    """
    if ranks == 1:
        return 0
    causal = without_adapters(model)
    hidden = rows * tokens * causal.config.hidden_size * causal.dtype.itemsize
    borders = 2
    if rank in (0, ranks - 1):
        borders = 1  # nothing goes back from the first stage, nor on from the last
    sent = borders * hidden
    embedding = causal.get_input_embeddings().weight
    tied = embedding is causal.get_output_embeddings().weight
    if tied and embedding.requires_grad and rank in (0, ranks - 1):
        sent += tensor_bytes(embedding)
    return sent


def predicted_rank_bytes(model: Any, *, ranks: int, rank: int) -> Kept:
    """The rank's blocks, and an end of the model on the first and on the last one."""
    whole = kept_whole(model)
    share_of_trained = _own_share(model, ranks, rank, trained_only=True)
    return Kept(
        round(whole.weights * _own_share(model, ranks, rank, trained_only=False)),
        round(whole.gradients * share_of_trained),
        round(whole.states * share_of_trained),
    )


def _own_share(model: Any, ranks: int, rank: int, *, trained_only: bool) -> float:
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
