"""What techniques leave on parameters, blocks and models for each other.

No technique imports another, and still some must know of each other: gradient accumulation cannot
work when an optimizer has used the gradients in backward already. So a technique leaves a mark, and
whoever has to know asks for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# On a parameter: True if the first backward updates the weight.
STEPS_IN_BACKWARD = "steps_in_backward"
# On an optimizer: True, since `.grad` is empty after backward.
TAKES_GRADIENTS_IN_BACKWARD = "takes_gradients_in_backward"
# On a parameter: the optimizer, which the parameter keeps alive.
GRADIENT_TAKER = "gradient_taker"
# On a tensor of an optimizer: the parameter that it stands for.
MASTER_OF = "master_of"
# On a block: its number among the blocks.
CHECKPOINTED_INDEX = "checkpointed_index"
# On a block: True if it runs as compiled code when it trains.
COMPILED = "compiled"
# On a layer: the function that has quantized it, by its name.
QUANTIZED_BY = "quantized_by"
# On a layer: True if all tokens of a call share a scale, so that each result depends on the others.
ONE_SCALE_PER_CALL = "one_scale_per_call"
# On a trunk: the attention under which a row is one document.
ONE_DOCUMENT_UNDER = "one_document_under"
# On a model: name and id of the tokens that were added to it.
ADDED_TOKENS = "added_tokens"
# On a model: the token with which it has learnt to end an answer.
LEARNT_END = "learnt_end"


def mark(thing: Any, name: str, value: Any = True) -> None:
    """Leave a mark."""
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
