"""What transformers calls in a model whose sequences are spread over ranks, and what is refused.

transformers looks attention up by the name in `config._attn_implementation`. Each context has a
name of its own, so a model carries only a string, and a deep copy of it works as the original does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recipes_lib.core.model.causal_lm import projection_widths, without_adapters
from recipes_lib.parallel.context_parallel.kernels import AMPERE
from recipes_lib.parallel.context_parallel.ring import ring_attention, tokens_of
from recipes_lib.parallel.context_parallel.ulysses import ulysses_attention


@dataclass(frozen=True)
class Context:
    """The ranks that share a sequence, and how."""

    kind: str  # "ring" or "ulysses"
    mesh: Any

    @property
    def group(self) -> Any:
        """The process group of the ranks."""
        return self.mesh.get_group()

    @property
    def ranks(self) -> int:
        """How many ranks share a sequence."""
        return self.mesh.size()

    @property
    def zig_zag(self) -> bool:
        """Whether each rank has an early and a late piece, as a ring needs it for balance."""
        return self.kind == "ring"

    @property
    def pieces(self) -> int:
        """Into how many pieces a sequence is cut."""
        return 2 * self.ranks if self.zig_zag else self.ranks

    def tokens_of_rank(self, seq: int) -> Tensor:
        """The places of this rank's tokens in rows of `seq` tokens."""
        return tokens_of(self.mesh.get_local_rank(), self.ranks, seq, zig_zag=self.zig_zag)


CONTEXTS: dict[str, Context] = {}  # by the name that a model's configuration holds


def context_of(model: Any) -> Context:
    """The context of a model. Raises ValueError if it has none."""
    name = _attention_of(model)
    if name not in CONTEXTS:
        raise ValueError(
            f"the attention of this model is {name!r}, which knows no other ranks: call "
            f"apply_context_parallel(model) first"
        )
    return CONTEXTS[name]


def put_into(model: Any, context: Context) -> None:
    """Let the attention of `model` be that of `context`, and its forward check what it is given."""
    from transformers import AttentionInterface, AttentionMaskInterface

    # "sdpa" and "flash" in a name would make transformers take it for its own.
    name = f"{context.kind}_over_ranks_{len(CONTEXTS)}"
    CONTEXTS[name] = context
    AttentionInterface.register(name, _attention)
    AttentionMaskInterface.register(name, _no_mask)
    causal = without_adapters(model)
    causal.set_attn_implementation(name)
    causal.register_forward_pre_hook(_check_arguments, with_kwargs=True)


def _attention(
    module: Any,
    query: Tensor,  # [B, H, S/N, E]
    key: Tensor,  # [B, KV, S/N, E]
    value: Tensor,  # [B, KV, S/N, E]
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    documents: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer: -> [B, S/N, H, E]."""
    context = CONTEXTS[module.config._attn_implementation]
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    if torch.is_autocast_enabled(query.device.type):
        # Positions turn queries and keys in fp32. PyTorch's attention casts them, and so do we.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if context.kind == "ring":
        out = ring_attention(query, key, value, group=context.group, scale=scaling)
    else:
        out = ulysses_attention(
            query, key, value, group=context.group, scale=scaling, documents=documents
        )
    return out.transpose(1, 2), None


def _no_mask(*_: Any, **__: Any) -> None:
    """What transformers calls for a mask, once per forward: the attention above needs none."""
    return


def _check_arguments(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before each forward: the positions have to be those of this rank's tokens."""
    context = context_of(model)
    ids = kwargs.get("input_ids")
    positions = kwargs.get("position_ids")
    if args or ids is None or positions is None:
        raise ValueError(
            "this model gets parts of sequences, and without positions it would count from 0 on "
            "every rank: call model(**shard_sequence(model, input_ids, labels))"
        )
    if kwargs.get("attention_mask") is not None or kwargs.get("use_cache") is not False:
        raise ValueError(
            "with sequences over ranks there is no attention_mask and no KV cache: give "
            "use_cache=False, and rows that are padded on the right with labels of -100"
        )
    if kwargs.get("labels") is not None and kwargs.get("shift_labels") is None:
        raise ValueError(
            "labels that are shifted behind the cut lose a token: give what shard_sequence returns"
        )
    if kwargs.get("documents") is not None:
        return  # positions restart, and shard_sequence has checked them
    mine = context.tokens_of_rank(ids.shape[1] * context.ranks).to(positions.device)
    if not torch.equal(positions, mine.expand_as(positions)):
        raise ValueError(
            f"these are not the positions of rank {context.mesh.get_local_rank()} of "
            f"{context.ranks}: give what shard_sequence returns"
        )


# --- guards ---------------------------------------------------------------------------------------


def require_attention(model: Any, kind: str) -> None:
    """Raise ValueError for a model whose attention is not plain causal attention, or is changed."""
    causal = without_adapters(model)
    config = causal.config.get_text_config()
    now = _attention_of(model)
    if now in CONTEXTS:
        raise ValueError(
            f"the sequences of this model are spread over ranks already ({now}): apply it once"
        )
    if now not in ("eager", "sdpa", "flash_attention_2", "fused"):
        raise ValueError(
            f"the attention of this model is {now!r}, which this would undo: give a model with "
            f"'sdpa' attention"
        )
    obstacle = _obstacle(config)
    if obstacle is None and not causal._supports_attention_backend:
        obstacle = "computes attention by itself"
    if obstacle:
        raise ValueError(
            f"this {type(causal).__name__} {obstacle}, which attention over ranks does not "
            f"compute: give a model with plain causal attention, such as Llama"
        )
    if kind == "ring":
        _require_kernel(causal)


def _obstacle(config: Any) -> str | None:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if kinds != {"full_attention"}:
        return f"has layers of the kinds {', '.join(sorted(kinds))}"
    if window is not None and not hasattr(config, "layer_types"):
        return f"has a window of {window} tokens"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "caps its scores"
    if getattr(config, "attention_dropout", 0) or getattr(config, "attn_pdrop", 0):
        return "has dropout in its attention"
    if not hasattr(config, "num_attention_heads"):
        return "has no attention"
    return None


def _require_kernel(causal: Any) -> None:
    """On a GPU the operators that return the log-sum-exp take heads of 8 n, and no bf16 before
    Ampere.
    """
    if causal.device.type != "cuda":
        return
    query, _, _ = projection_widths(causal.config)
    head = query // causal.config.num_attention_heads
    dtype = causal.dtype
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability(causal.device) < AMPERE:
        raise ValueError(
            f"{torch.cuda.get_device_name(causal.device)} has no attention in bf16: load the model "
            f"in torch.float32 or torch.float16"
        )
    if head % 8 or head > 256:
        raise ValueError(
            f"heads of {head}: on a GPU the ring takes multiples of 8 up to 256; take "
            f"kind='ulysses'"
        )


def _attention_of(model: Any) -> str | None:
    return without_adapters(model).config._attn_implementation
