"""What transformers sees of a model with sliding window attention, and what is refused.

transformers looks two functions up by the name that `config._attn_implementation` holds: one makes
the mask, once per forward, and one computes attention, in every layer. How far a layer reads stands
on its attention module, in the attribute `reach`. A deep copy of the model keeps it; a saved model
does not.

Shapes: B batch, H heads of queries, KV heads of keys, Q new tokens, S all tokens, E head dimension.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._guards import active_fake_mode

from recipes_lib.attention.sliding_window import sliding_window_attention
from recipes_lib.attention.sliding_window.banded import band
from recipes_lib.core.checks import check_several
from recipes_lib.core.model.causal_lm import decoder_blocks, selects_keys

NAME = "recipes_sliding_window"  # transformers takes "sdpa" or "flash" in a name for its own


class Reach(NamedTuple):
    """How far an attention module reads: its attribute `reach`."""

    window: int | None  # the last tokens; None for all
    sinks: int  # the first tokens


def register() -> str:
    """Make this attention known to transformers; returns its name there."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _no_mask)
    return NAME


def attentions_of(model: Any) -> list[nn.Module]:
    """The attention module of each block. Raises ValueError if the model cannot have another."""
    config = model.config.get_text_config()
    found = [_causal_modules(block) for block in decoder_blocks(model)]
    if len(_causal_modules(model)) != sum(map(len, found)):
        raise ValueError(
            f"{type(model).__name__} has attention outside of its list of blocks, as in a second "
            f"list: a window for some of it would be another model than asked for"
        )
    if selects_keys(model):
        raise ValueError(
            f"{type(model).__name__} selects the keys of each query by an indexer, which a window "
            f"would leave out: keep this model's attention"
        )
    one_in_each = all(len(modules) == 1 for modules in found)
    known_kinds = set(_kinds(config)) <= {"full_attention", "sliding_attention"}
    if not one_in_each or not known_kinds or not model._supports_attention_backend:
        raise ValueError(
            f"{type(model).__name__}: "
            f"every block needs one attention, causal and looked up by its name"
        )
    cap = getattr(config, "attn_logit_softcapping", None)
    if cap is not None:
        raise ValueError(
            f"attn_logit_softcapping={cap}: SDPA caps no scores; "
            f"keep this model's attention, or cap=None"
        )
    return [modules[0] for modules in found]


def _causal_modules(module: nn.Module) -> list[nn.Module]:
    return [inside for inside in module.modules() if getattr(inside, "is_causal", False)]


def _kinds(config: Any) -> list[str]:
    """What each layer's attention is called; empty where all are alike."""
    return getattr(config, "layer_types", None) or []


def reach_of_layers(
    model: Any,
    attentions: list[nn.Module],
    *,
    window: int,
    sinks: int,
    layers: Iterable[int] | None,
) -> list[Reach]:
    """How far each layer will read: the chosen ones as asked, the others as they do now.

    Raises ValueError for an unknown layer, and for a window wider than the one a layer has.
    """
    every_layer = range(len(attentions))
    chosen = set(every_layer)
    if layers is not None:
        check_several(layers=layers)
        chosen = set(layers)
    if not chosen or not chosen <= set(every_layer):
        raise ValueError(
            f"layers={sorted(chosen)}: "
            f"give indices from 0 to {len(attentions) - 1}, or None for all"
        )
    reaches = []
    for layer, attention in enumerate(attentions):
        own = _own_window(model.config.get_text_config(), layer, attention)
        if layer not in chosen:
            reaches.append(Reach(own, 0))
            continue
        if own is not None and (window > own or sinks):
            raise ValueError(
                f"window={window}, sinks={sinks}: "
                f"layer {layer} takes its own {own} at most, and no sinks"
            )
        reaches.append(Reach(window, sinks))
    return reaches


def _own_window(config: Any, layer: int, attention: nn.Module) -> int | None:
    """The window that the model itself gives this layer; None for full attention."""
    kinds = _kinds(config)
    if kinds and kinds[layer] != "sliding_attention":
        return None
    of_the_model = getattr(config, "sliding_window", None)
    return getattr(attention, "sliding_window", of_the_model)


def _attention(
    module: nn.Module,
    query: Tensor,  # [B, H, Q, E], the new tokens
    key: Tensor,  # [B, KV, S, E], all tokens
    value: Tensor,  # [B, KV, S, E]
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer -> [B, Q, H, E], and no attention weights."""
    _require_window(module)
    _refuse_what_sdpa_ignores(attention_mask, dropout, options)
    _refuse_packed_rows(module, options)
    queries = query.shape[2]
    keys = key.shape[2]
    window = module.reach.window or keys
    sinks = module.reach.sinks
    if queries == keys:
        out = sliding_window_attention(query, key, value, window=window, sinks=sinks, scale=scaling)
    else:  # tokens after those in a KV cache: the last rows of the matrix
        reads = band(queries, keys, window, sinks, query.device)  # [Q, S]
        out = F.scaled_dot_product_attention(
            query, key, value, reads, scale=scaling, enable_gqa=True
        )
    return out.transpose(1, 2).contiguous(), None


def _require_window(module: nn.Module) -> None:
    """Raise ValueError in a model whose configuration alone was copied from one with windows."""
    if not hasattr(module, "reach"):
        raise ValueError(
            "this model has the attention of a sliding window and no window: call "
            "apply_sliding_window(model, window=...), or model.set_attn_implementation('sdpa')"
        )


def _refuse_what_sdpa_ignores(mask: Tensor | None, dropout: float, options: dict[str, Any]) -> None:
    asked = {"a mask [S, S]": mask}
    if dropout:
        asked["dropout"] = dropout
    for name in ("output_attentions", "softcap", "s_aux", "position_bias", "indices"):
        asked[name] = options.get(name)
    for name, value in asked.items():
        if value is not None and value is not False:
            raise ValueError(
                f"sliding window attention takes no {name}: set it to 0 or None in the model"
            )


def _refuse_packed_rows(module: nn.Module, options: dict[str, Any]) -> None:
    # transformers looks for packed rows only where there is neither a mask nor a cache. One look
    # per forward is enough, and a dry run has no positions to look at.
    if module.layer_idx != 0 or active_fake_mode():
        return
    positions = options.get("position_ids")
    if positions is None and torch.compiler.is_compiling():
        raise ValueError(
            "torch.compile hides from this attention whether rows are packed, because the model "
            "gives it no positions: run this model without torch.compile"
        )
    if positions is not None and (positions.diff() != 1).any():
        raise ValueError(
            "positions restart, as in packed rows: give one text per row, padded on the right"
        )


def _no_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int,
    kv_offset: int,
    attention_mask: Tensor | None,
    allow_is_causal_skip: bool,
    **_: Any,
) -> None:
    """What transformers calls instead of making a mask [S, S]: there is none.

    Padding on the right is read by padding only.
    """
    left_padding = False
    if attention_mask is not None:
        left_padding = (attention_mask[:, 1:] > attention_mask[:, :-1]).any()
    # transformers forbids to leave the mask out where rows are packed. While torch.compile traces,
    # it cannot look for that, and forbids it for all rows. Then `_refuse_packed_rows` looks.
    packed = not allow_is_causal_skip and not torch.compiler.is_compiling()
    # A static cache has keys behind the last query.
    static_cache = q_offset + q_length != kv_offset + kv_length
    if left_padding or packed or static_cache:
        raise ValueError(
            "left padding, packed rows or a static cache: "
            "give one text per row, padded on the right"
        )
