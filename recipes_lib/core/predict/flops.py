"""How many operations of matrix products a training step needs, whatever a recipe adds to them.

    T tokens through a layer [F, D]     forward            2 T D F
                                        input's gradient   2 T D F    if something below it trains
                                        weight's gradient  2 T D F    if the weight trains

A multiplication and an addition are two operations. Attention multiplies twice in forward, queries
with keys and scores with values, and four times in backward. Each query sees itself and the tokens
before it, so only half of the square of scores counts.

Divided by the rate of the device and by the seconds of the step, this says how much of the limit is
reached. That is why nothing counts that a recipe does on top: no second forward of a checkpoint, no
unpacking of four bits. Norms, activations and the optimizer multiply no matrices and do not count.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from recipes_lib.core.model.causal_lm import (
    decoder_blocks,
    norms_of,
    projection_widths,
    trunk,
    without_adapters,
)
from recipes_lib.core.model.linears import features, is_linear

# The layers that read what comes into a block. Behind them, a block has made something of it.
READ_THE_BLOCKS_INPUT = {"q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn"}


def step_operations(model: Any, *, rows: int, length: int) -> int:
    """Operations of one training step of `model` as it is now, on `rows` x `length` tokens.

    The model may have adapters and 4-bit weights. Every linear layer counts for every token, and
    every block attends to all tokens before: a mixture of experts and a sliding window do less.
    """
    layers = 0  # operations per token
    attentions = 0  # how many times that of a forward
    blocks = decoder_blocks(model)
    below_trains = _trains_below_the_blocks(model)
    for block in blocks:
        layers += _block(block, below_trains=below_trains)
        below_trains = below_trains or _trains([block])
        # Where nothing below trains, nobody wants a gradient. Else backward multiplies twice as
        # often as forward.
        attentions += 3 if below_trains else 1
    # The final norm stands between the blocks and the output layer.
    below_trains = below_trains or _trains(norms_of(trunk(model))[-1:])
    inside = set(blocks.modules())
    for _, layer in _linear_layers(without_adapters(model)):
        if layer not in inside:  # the output layer
            layers += _layer(layer, input_gradient=below_trains)
    return rows * length * layers + attentions * rows * _attention_forward(model, length)


def _trains_below_the_blocks(model: Any) -> bool:
    """Whether a gradient goes through all blocks, to the embedding."""
    behind = [*norms_of(trunk(model))[-1:], model.get_output_embeddings()]
    elsewhere = set(decoder_blocks(model).parameters())
    for module in behind:
        elsewhere.update(module.parameters())
    # An output layer that is tied to the embedding is the same parameter.
    elsewhere -= set(model.get_input_embeddings().parameters())
    return any(p.requires_grad for p in model.parameters() if p not in elsewhere)


def _block(block: torch.nn.Module, *, below_trains: bool) -> int:
    """Operations per token of all linear layers in a block."""
    operations = 0
    block_trains = _trains([block])
    # Its first norm stands between what comes into the block and the layers that read it.
    input_wants_gradient = below_trains or _trains(norms_of(block)[:1])
    for name, layer in _linear_layers(block):
        wants_gradient = below_trains or block_trains
        if _reads_the_blocks_input(name):
            wants_gradient = input_wants_gradient
        operations += _layer(layer, input_gradient=wants_gradient)
    return operations


def _attention_forward(model: Any, length: int) -> int:
    """Operations of one block's attention in forward, on one row."""
    width, _, _ = projection_widths(model.config)  # of all heads together
    pairs = length * (length + 1) // 2  # of a query and a key that it sees
    return 2 * 2 * pairs * width


def _layer(layer: torch.nn.Module, *, input_gradient: bool) -> int:
    """Operations per token of a linear layer: forward, and the gradients that somebody wants."""
    inputs, outputs = features(layer)
    products = 1
    if input_gradient:
        products += 1
    if layer.weight.requires_grad:
        products += 1
    return products * 2 * inputs * outputs


def _linear_layers(module: torch.nn.Module) -> Iterable[tuple[str, torch.nn.Module]]:
    return [(name, each) for name, each in module.named_modules() if is_linear(each)]


def _reads_the_blocks_input(name: str) -> bool:
    """Whether a layer reads the block's input: q_proj and its adapter's A, but not its B."""
    parts = name.split(".")
    return bool(READ_THE_BLOCKS_INPUT & set(parts)) and "lora_B" not in parts


def _trains(modules: Iterable[torch.nn.Module]) -> bool:
    return any(p.requires_grad for module in modules for p in module.parameters())
