"""What one rank of tensor parallelism keeps, and what it sends.

Legend: T tokens of a rank, D hidden, L layers, V vocabulary, N ranks; `size` is the bytes of one
element.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from recipes_lib.core.model.causal_lm import decoder_blocks, norms_of, trunk
from recipes_lib.core.model.sizes import tensor_bytes
from recipes_lib.parallel._arithmetic import STATES, Kept, kept_whole

READERS = 2  # per block: attention and the feed-forward layers each read [T, D] as a whole


def predicted_sent_bytes(model: Any, *, rows: int, tokens: int, ranks: int) -> int:
    """Bytes that one rank sends in the forward and backward of one micro-batch.

    The stream [T, D] is exchanged at 2 L + 1 places, twice in forward and twice in backward: a
    reduce-scatter and an all-gather, each (N-1)/N of it. The gradients of norms follow, and three
    numbers per token for the loss.

    `model` is the whole one, before it is cut.
    """
    tokens = rows * tokens
    places = READERS * len(decoder_blocks(model)) + 1  # the first is behind the embedding
    of_token = model.config.hidden_size * model.dtype.itemsize  # in the residual stream
    bytes_in_rings = 4 * places * tokens * of_token
    for norm in _whole_norms(model):
        bytes_in_rings += sum(2 * tensor_bytes(weight) for weight in norm.parameters())
    bytes_in_rings += 2 * 3 * 4 * tokens
    return bytes_in_rings * (ranks - 1) // ranks


def _whole_norms(model: Any) -> list[nn.Module]:
    """All norms: those of the blocks, those of heads inside of them, and the last one."""
    norms = norms_of(trunk(model))[-1:]
    for block in decoder_blocks(model):
        norms += norms_of(block) + norms_of(block.self_attn)
    return norms


def predicted_rank_bytes(model: Any, *, ranks: int) -> Kept:
    """A part of each matrix, and small weights and buffers whole."""
    whole = kept_whole(model)
    small = _whole_parameter_bytes(model)
    buffers = sum(tensor_bytes(buffer) for buffer in model.buffers())
    staying = Kept(small + buffers, small, STATES * small)
    parts = []
    for size, stays in zip(whole, staying, strict=True):
        stays = min(stays, size)  # of a frozen norm there is no gradient
        parts.append(stays + (size - stays) // ranks)
    return Kept(*parts)


def _whole_parameter_bytes(model: Any) -> int:
    """Bytes of norms, and of the biases of layers that are cut by their input.

    Such a layer adds its bias once, after the sum.
    """
    modules = _whole_norms(model)
    whole = sum(tensor_bytes(p) for module in modules for p in module.parameters())
    for block in decoder_blocks(model):
        for layer in (block.self_attn.o_proj, block.mlp.down_proj):
            if layer.bias is not None:
                whole += tensor_bytes(layer.bias)
    return whole
