"""Context parallelism: each rank holds a part of the tokens, and attention still sees all of them.

Problem    One sequence is so long that its activations do not fit one GPU. Data parallelism needs
           more sequences, and no rank can compute attention from its own tokens alone.
Idea       All other layers look at one token at a time, so only attention has to talk.

           Ring: queries stay, keys and values travel. After N steps each query has met all keys.
           Two results on different keys become one by their log-sum-exp L:

               L = log(exp(L_a) + exp(L_b)),   out = exp(L_a - L) out_a + exp(L_b - L) out_b

           Ulysses: one all-to-all turns "all heads of some tokens" into "some heads of all tokens",
           ordinary attention follows, and another one turns it back.

           Causal attention needs no keys of the future. So tokens are dealt out in a zig-zag, or
           the first rank of a ring would wait for the last one:

               in one piece   rank 0: 0 1    rank 1: 2 3    rank 2: 4 5    rank 3: 6 7
               zig-zag        rank 0: 0 7    rank 1: 1 6    rank 2: 2 5    rank 3: 3 4
Saves      Activations and logits, by the number of ranks. Weights and states stay whole: combine it
           with sharding (FSDP over the same ranks).
Costs      Ring: keys and values go round once in forward; in backward they go round again with
           their gradients. Ulysses: four all-to-alls each way, and the ranks must divide the heads.
Use when   A single sequence does not fit, even with checkpointing and a chunked loss. FSDP does not
           help there, because it shards no activations.
Not when   Sequences are short or many: then data parallelism sends less. Rows of several documents,
           which would see each other. Padding on the left. A ring of GPUs wants Ampere and 16 bits.
In production   `torch.distributed.tensor.experimental.context_parallel` (CUDA only); accelerate
           `ParallelismConfig(cp_size=…)`; Megatron-LM `--context-parallel-size`; DeepSpeed Ulysses.
Source     Liu et al., "Ring Attention with Blockwise Transformers" (arXiv 2310.01889); Brandon et
           al., "Striped Attention" (2311.09431), on balance; Jacobs et al., "DeepSpeed Ulysses"
           (2309.14509). The zig-zag is that of Llama 3 (2407.21783) and of ring-flash-attention.

Shapes: B batch, H heads, KV key and value heads, S tokens of a row, N ranks, E head dimension.

ring  keys and values go round, forward and backward
ulysses  all-to-all between tokens and heads
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from recipes_lib.core.checks import check_choice, check_whole
from recipes_lib.core.data import IGNORED
from recipes_lib.core.model.bytes_of_tensors import trainable_bytes
from recipes_lib.core.model.causal_lm import (
    decoder_blocks,
    projection_widths,
    require_causal_lm,
    without_adapters,
)
from recipes_lib.core.model.loss import next_tokens
from recipes_lib.core.ranks.agreement import agree
from recipes_lib.core.ranks.collectives import sums_over_ranks
from recipes_lib.core.ranks.meshes import one_axis
from recipes_lib.parallel.context_parallel.ring import ring_attention, tokens_of
from recipes_lib.parallel.context_parallel.ulysses import heads_to_send, ulysses_attention

KINDS = ("ring", "ulysses")
KNOWN = ("eager", "sdpa", "flash_attention_2", "fused")  # kinds of attention that are the same

# --- the idea: what a learner can copy ------------------------------------------------------------


def attention_and_sums(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """The idea of context parallelism: attention on some keys, and log of sum of exp(scores).

    q [B, H, Q, E], k and v [B, H, K, E] -> out [B, H, Q, E], log-sum-exp [B, H, Q, 1].
    """
    scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5  # [B, H, Q, K]
    if causal:
        future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    sums = scores.logsumexp(-1, keepdim=True)
    return (scores - sums).exp() @ v, sums


def merge(out: Tensor, sums: Tensor, more: Tensor, more_sums: Tensor) -> tuple[Tensor, Tensor]:
    """The idea of context parallelism: attention on some keys and on others becomes one."""
    both = torch.logaddexp(sums, more_sums)
    return (sums - both).exp() * out + (more_sums - both).exp() * more, both


def ring_by_hand(q: Tensor, k: Tensor, v: Tensor, *, ranks: int) -> Tensor:
    """The idea of context parallelism: causal attention [B, H, S, E] by a ring in one process."""
    q_of = q.chunk(ranks, dim=2)  # rank r has the tokens of chunk r
    k_of = k.chunk(ranks, dim=2)
    v_of = v.chunk(ranks, dim=2)
    outputs = []
    for rank in range(ranks):
        out, sums = attention_and_sums(q_of[rank], k_of[rank], v_of[rank], causal=True)
        for source in range(rank):  # what comes round from earlier tokens
            more = attention_and_sums(q_of[rank], k_of[source], v_of[source], causal=False)
            out, sums = merge(out, sums, *more)
        outputs.append(out)
    return torch.cat(outputs, dim=2)


# --- the technique --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Context:
    """The ranks that share a sequence, and how."""

    kind: str  # "ring" or "ulysses"
    mesh: Any

    @property
    def pieces(self) -> int:
        """Into how many a sequence is cut: in a ring each rank has an early and a late piece."""
        return (2 if self.kind == "ring" else 1) * self.mesh.size()

    def tokens_of_rank(self, seq: int) -> Tensor:
        """The places of this rank's tokens in rows of `seq` tokens."""
        rank, ranks = self.mesh.get_local_rank(), self.mesh.size()
        return tokens_of(rank, ranks, seq, zig_zag=self.kind == "ring")


# By the name that `config._attn_implementation` of a model has, under which transformers looks
# attention up. So a model carries only a string, and a deep copy of it works as the original does.
CONTEXTS: dict[str, Context] = {}


def apply_context_parallel(model: Any, *, mesh: Any = None, kind: str = "ring") -> Any:
    """Let `model` train on parts of sequences, of which each rank has one. Returns `model`.

    Every rank of `mesh` has the same weights and the same rows. A step:

        part = shard_sequence(model, input_ids, labels)      # whole rows -> this rank's part
        loss = model(**part).loss                            # this rank's part of the loss
        loss.backward()
        sum_gradients(model)                                 # now all ranks have the same

    Where DDP or FSDP average gradients over these ranks, multiply the loss by the number of ranks
    that they average over, and leave `sum_gradients` out.

    Args:
        mesh: one dimension, the ranks that share a sequence; by default all ranks.
        kind: "ring", or "ulysses".
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    agree(model=model, kind=kind)
    require_causal_lm(model)
    check_choice(KINDS, kind=kind)
    mesh = one_axis(mesh, such_as="context")
    causal = without_adapters(model)
    _require_plain_causal_attention(causal)
    _require_divisible_heads(causal, kind, mesh.size())
    # "sdpa" and "flash" in a name would make transformers take it for its own.
    name = f"{kind}_over_ranks_{len(CONTEXTS)}"
    CONTEXTS[name] = Context(kind, mesh)
    AttentionInterface.register(name, _attention_over_ranks)
    AttentionMaskInterface.register(name, _no_mask_over_ranks)
    causal.set_attn_implementation(name)
    causal.register_forward_pre_hook(_check_rows_are_of_this_rank, with_kwargs=True)
    return model


def _attention_over_ranks(
    module: Any,
    query: Tensor,  # [B, H, S/N, E]
    key: Tensor,  # [B, KV, S/N, E]
    value: Tensor,  # [B, KV, S/N, E]
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention over the tokens of all ranks, as transformers calls it: -> [B, S/N, H, E]."""
    context = CONTEXTS[module.config._attn_implementation]
    options = {
        "group": context.mesh.get_group(),
        "scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
    }
    if torch.is_autocast_enabled(query.device.type):
        # Positions turn queries and keys in fp32. PyTorch's attention casts them, and so do we.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    attention = ring_attention if context.kind == "ring" else ulysses_attention
    return attention(query, key, value, **options).transpose(1, 2), None


def _no_mask_over_ranks(*_: Any, **__: Any) -> None:
    """What transformers calls for a mask, once per forward: the attention above needs none."""
    return


def shard_sequence(
    model: Any, input_ids: Tensor, labels: Tensor, *, tokens: int | None = None
) -> dict[str, Any]:
    """This rank's part of the tokens of whole rows [B, S], as arguments of the model's forward.

    The `.loss` of the forward is the sum over this rank's tokens, divided by the tokens of all
    ranks that count: a mean over a rank's own tokens would weigh them unequally. The sum over the
    ranks is the loss.

    Args:
        input_ids: [B, S], the same on every rank, one document in a row.
        labels: [B, S] as transformers takes them: not shifted, IGNORED where nothing counts.
        tokens: what the sum is divided by, by default the labels of these rows that count; with
            several groups of ranks that have rows of their own, the number of all of them.
    """
    context = context_of(model)
    agree(input_ids=[*input_ids.shape], labels=[*labels.shape])
    seq = input_ids.shape[1]
    if seq % context.pieces:
        raise ValueError(
            f"rows of {seq} tokens: {context.kind} over {context.mesh.size()} ranks cuts them into "
            f"{context.pieces} pieces; pad them to a multiple, with labels of -100"
        )
    # The token in front of a cut predicts the one behind it, so labels are shifted before the cut.
    targets = next_tokens(labels)
    tokens = int((targets != IGNORED).sum()) if tokens is None else tokens
    check_whole(tokens=tokens)
    mine = context.tokens_of_rank(seq).to(input_ids.device)
    return {
        "input_ids": input_ids[:, mine],
        "labels": targets[:, mine],
        "shift_labels": targets[:, mine],  # transformers would shift `labels` once more
        "position_ids": mine.expand(len(input_ids), -1),
        "num_items_in_batch": tokens,  # what it divides the sum by
        "use_cache": False,
    }


def sum_gradients(model: Any) -> None:
    """After backward: the sum of each gradient over the ranks that share a sequence.

    With several micro-batches call it once, after the last of them.
    """
    group = context_of(model).mesh.get_group()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    works = [distributed.all_reduce(each, group=group, async_op=True) for each in gradients]
    for work in works:
        work.wait()


def loss_of_all(model: Any, loss: Tensor) -> float:
    """The sum of the losses of all parts of the sequence, for the log."""
    (total,) = sums_over_ranks(loss.item(), mesh=context_of(model).mesh)
    return total


def context_of(model: Any) -> Context:
    """The context of parallelism of a model that has one."""
    name = without_adapters(model).config._attn_implementation
    if name not in CONTEXTS:
        raise ValueError(
            f"the attention of this model is {name!r}, which knows no other ranks: call "
            f"apply_context_parallel(model) first"
        )
    return CONTEXTS[name]


# --- what would silently be another model ---------------------------------------------------------


def _check_rows_are_of_this_rank(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before each forward: the positions and labels have to be those of this rank's tokens."""
    context = context_of(model)
    given = {name for name, value in kwargs.items() if value is not None}
    way_out = "call model(**shard_sequence(model, input_ids, labels))"
    if args or not {"input_ids", "position_ids"} <= given:
        raise ValueError(f"without positions every rank would count from 0: {way_out}")
    if "attention_mask" in given or kwargs.get("use_cache") is not False:
        raise ValueError(
            "with sequences over ranks there is no attention_mask and no KV cache: give "
            "use_cache=False, and rows that are padded on the right with labels of -100"
        )
    if "labels" in given and "shift_labels" not in given:
        raise ValueError(f"labels that are shifted behind the cut lose a token: {way_out}")
    positions = kwargs["position_ids"]
    seq = kwargs["input_ids"].shape[1] * context.mesh.size()
    mine = context.tokens_of_rank(seq).to(positions.device)
    if not torch.equal(positions, mine.expand_as(positions)):
        raise ValueError(
            f"these are not the positions of rank {context.mesh.get_local_rank()} of "
            f"{context.mesh.size()}: {way_out}"
        )


def _require_plain_causal_attention(causal: Any) -> None:
    """Tokens on ranks want plain attention: ValueError for layers that do more than read back."""
    config = causal.config.get_text_config()
    now = causal.config._attn_implementation
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = None if hasattr(config, "layer_types") else getattr(config, "sliding_window", None)
    dropout = [getattr(config, name, 0) for name in ("attention_dropout", "attn_pdrop")]
    obstacles = {
        f"has {now!r} attention already": now not in KNOWN,
        f"has layers of the kinds {', '.join(sorted(kinds))}": kinds != {"full_attention"},
        f"has a window of {window} tokens": window is not None,
        "caps its scores": getattr(config, "attn_logit_softcapping", None) is not None,
        "has dropout in its attention": max(dropout) > 0,
        "computes attention by itself": not causal._supports_attention_backend,
    }
    for obstacle, is_there in obstacles.items():
        if is_there:
            raise ValueError(
                f"this {type(causal).__name__} {obstacle}, which attention over ranks would not "
                f"compute: give a model with plain causal attention, such as Llama"
            )


def _require_divisible_heads(causal: Any, kind: str, ranks: int) -> None:
    """Context parallelism by Ulysses divides heads."""
    heads = causal.config.num_attention_heads
    if kind == "ulysses" and heads % ranks:
        raise ValueError(f"{heads} heads do not divide into {ranks} ranks: take kind='ring'")


# --- the arithmetic -------------------------------------------------------------------------------


def predicted_ring_work(ranks: int, *, zig_zag: bool = True) -> list[list[float]]:
    """How context parallelism by a ring shares out the work: [step][rank].

    The unit is attention of all queries of one rank to all keys of another. A step is as long as
    that of its busiest rank. With the zig-zag all ranks have half a unit in every step. Without it
    some have a whole one in every step, and the others wait.
    """
    if zig_zag:
        return [[0.5] * ranks for _ in range(ranks)]
    steps = []
    for step in range(ranks):
        from_earlier = [1.0 if rank >= step else 0.0 for rank in range(ranks)]
        steps.append(from_earlier if step > 0 else [0.5] * ranks)
    return steps


def predicted_sent_bytes(
    model: Any, *, rows: int, tokens: int, ranks: int, kind: str = "ring"
) -> int:
    """Bytes that a rank of context parallelism sends in a step of whole `rows` of `tokens`.

    An all-to-all of X bytes sends (N-1)/N X, an all-reduce in a ring twice that.
    """
    causal = without_adapters(model)
    query, key, _ = projection_widths(causal.config)
    size = causal.dtype.itemsize
    own = rows * tokens // ranks  # the tokens of one rank
    away = (ranks - 1) / ranks
    if kind == "ring":
        keys_and_values = 2 * key * own
        forward = (ranks - 1) * keys_and_values * size
        # Gradients travel in fp32: they are sums over the ranks. The last step brings them home.
        backward = forward + ranks * keys_and_values * max(size, 4)
        if ranks == 1:
            backward = 0
    else:
        head_dim = query // causal.config.num_attention_heads
        heads = heads_to_send(key // head_dim, ranks)
        forward = away * (2 * query + 2 * heads * head_dim) * own * size
        backward = forward
    attention = len(decoder_blocks(model)) * (forward + backward)
    return round(attention + 2 * away * trainable_bytes(model))
