"""What a technique that recomputes blocks has to look after: other checkpoints, and KV caches.

A checkpointed block runs twice, once in forward and once more in backward. So whatever the
first run leaves behind is left a second time. A KV cache is such a thing. Models of Hugging
Face make an empty one unless they are told `use_cache=False`, and every block appends its keys
and values to it:

    forward     block(hidden, cache)    the cache holds  k v
    backward    block(hidden, cache)    the cache holds  k v k v: attention sees each token twice

Three cases, and what a checkpointed block does with each:

    no gradients, or a cache in eval mode   this is generation: the block runs as it is
    an empty cache in training              it only collects: without it the result is the same
    a filled cache in training              the earlier tokens matter, so it is an error

Some models of recurrences collect something else for generation (RWKV, xLSTM, RecurrentGemma). In
training that is an error, too, which says `use_cache=False`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from recipes_lib.core.model.marks import CHECKPOINTED_INDEX, any_marked

# What blocks call the argument that holds earlier tokens.
STATES = ("past_key_values", "past_key_value", "layer_past", "cache_params", "state")


def require_no_checkpoints(blocks: Iterable[nn.Module]) -> None:
    """Raise ValueError if a block is checkpointed already, by Hugging Face or a technique here."""
    blocks = list(blocks)
    by_hugging_face = any(getattr(block, "gradient_checkpointing", False) for block in blocks)
    if by_hugging_face or any_marked(blocks, CHECKPOINTED_INDEX):
        raise ValueError(
            "this model is checkpointed already: call core.model.mixins.take_out(model, …) or, for "
            "Hugging Face's own, model.gradient_checkpointing_disable() first"
        )


def caches_among(args: Iterable[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The KV caches among the arguments of a checkpointed block."""
    return [value for value in (*args, *kwargs.values()) if _is_cache(value)]


def generates(block: nn.Module, args: Iterable[Any], kwargs: dict[str, Any]) -> bool:
    """Whether no backward will follow, and a checkpointed block needs its KV cache as it is."""
    if not torch.is_grad_enabled():
        return True
    # A decoding loop that forgot `torch.no_grad()`.
    return not block.training and len(caches_among(args, kwargs)) > 0


def without_caches(
    args: Iterable[Any], kwargs: dict[str, Any], *, index: int, names: Iterable[str] = ()
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of block number `index` without KV caches: with them it may run twice.

    `names` are those of its arguments, in their order. Raises ValueError for a cache that holds
    tokens, and for states of another kind.
    """
    if any(_holds_tokens(cache, index) for cache in caches_among(args, kwargs)):
        raise ValueError(
            "a filled KV cache cannot pass through checkpointed blocks in training: the recomputed "
            "block would append to it; pass use_cache=False, or generate under model.eval() and "
            "torch.no_grad()"
        )
    _require_no_other_state(dict(zip(names, args)), kwargs)
    plain_args = [None if _is_cache(value) else value for value in args]
    plain_kwargs = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
    if "use_cache" in plain_kwargs:
        plain_kwargs["use_cache"] = False
    return plain_args, plain_kwargs


def _require_no_other_state(by_position: dict[str, Any], kwargs: dict[str, Any]) -> None:
    """A checkpointed block may have no other state: RWKV hands one on, RecurrentGemma keeps one."""
    named = by_position | kwargs
    states = [named[name] for name in STATES if named.get(name) is not None]
    is_other = not all(map(_is_cache, states))
    collects = named.get("use_cache") is True and not states
    stays_on = by_position.get("use_cache") is True  # it is turned off by name only
    if is_other or collects or stays_on:
        raise ValueError(
            "this model collects states for generation that are no KV cache, and a recomputed "
            "block would change them a second time: pass use_cache=False"
        )


def _holds_tokens(cache: Any, index: int) -> bool:
    """Whether the KV cache of the checkpointed block number `index` has seen tokens.

    Keys and values have a length. States of a convolution or of a recurrence have none: such a part
    says whether there was a token before.
    """
    parts = getattr(getattr(cache, "self_attention_cache", cache), "layers", [])
    if index >= len(parts):
        return False
    part = parts[index]
    if any(getattr(part, "has_previous_state", {}).values()):
        return True
    return hasattr(part, "get_seq_length") and part.get_seq_length() > 0


def _is_cache(value: Any) -> bool:
    from transformers import Cache

    return isinstance(value, Cache)
