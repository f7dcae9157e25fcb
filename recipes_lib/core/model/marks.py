"""What techniques leave on parameters, blocks and models for each other.

No technique imports another, and still some must know of each other: gradient accumulation cannot
work when an optimizer has used the gradients in backward already. So a technique leaves a mark, and
whoever has to know asks for it. These are all marks that there are:

    STEPS_IN_BACKWARD             on a parameter: True if the first backward updates the weight
    TAKES_GRADIENTS_IN_BACKWARD   on an optimizer: True, since `.grad` is empty after backward
    GRADIENT_TAKER                on a parameter: the optimizer, which the parameter keeps alive
    MASTER_OF                     on a tensor of an optimizer: the parameter that it stands for
    CHECKPOINTED_INDEX            on a block: its number among the blocks
    COMPILED                      on a block: True if it runs as compiled code when it trains
    QUANTIZED_BY                  on a layer: the function that has quantized it, by its name
    ONE_SCALE_PER_CALL            on a layer: True if all tokens of a call are rounded by one scale,
                                  so that a token's result depends on the others
    ONE_DOCUMENT_UNDER            on a trunk: the attention under which a row is one document
    ADDED_TOKENS                  on a model: name and id of the tokens that were added to it
    LEARNT_END                    on a model: the token with which it has learnt to end an answer

The first three are left by optimizer_in_backward and optimizer_offload, MASTER_OF by
optimizer_offload, CHECKPOINTED_INDEX by activation_checkpointing and nested_checkpointing, COMPILED
by compiled_blocks, QUANTIZED_BY by int8 and int4, ONE_SCALE_PER_CALL by int8,
ONE_DOCUMENT_UNDER by sliding_window and the probe, ADDED_TOKENS by grow_vocabulary and
LEARNT_END by stop_at.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

STEPS_IN_BACKWARD = "steps_in_backward"
TAKES_GRADIENTS_IN_BACKWARD = "takes_gradients_in_backward"
GRADIENT_TAKER = "gradient_taker"
MASTER_OF = "master_of"
CHECKPOINTED_INDEX = "checkpointed_index"
COMPILED = "compiled"
QUANTIZED_BY = "quantized_by"
ONE_SCALE_PER_CALL = "one_scale_per_call"
ONE_DOCUMENT_UNDER = "one_document_under"
ADDED_TOKENS = "added_tokens"
LEARNT_END = "learnt_end"


def mark(thing: Any, name: str, value: Any = True) -> None:
    """Leave a mark, one of the names above."""
    setattr(thing, name, value)


def marked(thing: Any, name: str) -> bool:
    """Whether the mark is there and not False. Block number 0 counts as marked."""
    value = getattr(thing, name, None)
    return value is not None and value is not False


def any_marked(things: Iterable[Any], name: str) -> bool:
    """Whether one of `things` has the mark."""
    return any(marked(thing, name) for thing in things)


def unmark(thing: Any, name: str) -> None:
    """Take the mark away, if it is there."""
    if hasattr(thing, name):
        delattr(thing, name)
