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
Not when   Sequences are short or many: then data parallelism sends less. Rows of several documents:
           a ring refuses them, Ulysses keeps them apart.
In production   `torch.distributed.tensor.experimental.context_parallel` (CUDA only); accelerate
           `ParallelismConfig(cp_size=…)`; Megatron-LM `--context-parallel-size`; DeepSpeed Ulysses.
Source     Liu et al., "Ring Attention with Blockwise Transformers" (arXiv 2310.01889); Brandon et
           al., "Striped Attention" (2311.09431), on balance; Jacobs et al., "DeepSpeed Ulysses"
           (2309.14509). The zig-zag is that of Llama 3 (2407.21783) and of ring-flash-attention.

Traps, and what happens here:

- Without `position_ids` a model counts 0, 1, 2, … on every rank, and trains on wrong positions. The
  forward of the model refuses positions that are not this rank's.
- Labels that are shifted after the cut lose the last token of each part. `shard_sequence` shifts
  them before.
- The mean over a rank's own tokens is not the mean: the loss is divided by the tokens of all ranks.
- Each rank has a part of each gradient: `sum_gradients` adds them up.

The ring is in ring.py, its kernels in kernels.py, the all-to-all
in ulysses.py, and what transformers calls in hf.py.

Shapes: B batch, H heads, KV key and value heads, S tokens of a row, N ranks, E head dimension.

hf  what transformers calls, and what is refused
kernels  attention with its log-sum-exp, and the backward that takes it
ring  keys and values go round, forward and backward
ulysses  all-to-all between tokens and heads
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, distributed

from recipes_lib.core.checks import check_choice, check_flag, check_whole
from recipes_lib.core.data import IGNORED
from recipes_lib.core.model.causal_lm import (
    decoder_blocks,
    projection_widths,
    require_causal_lm,
    without_adapters,
)
from recipes_lib.core.predict.budget import Budget, Order, Shape, estimate
from recipes_lib.core.predict.plain_step import trainable_bytes
from recipes_lib.core.ranks.agreement import agree
from recipes_lib.core.ranks.collectives import sums_over_ranks
from recipes_lib.core.ranks.meshes import default_mesh, require_mesh
from recipes_lib.parallel.context_parallel.hf import (
    Context,
    context_of,
    put_into,
    require_attention,
)
from recipes_lib.parallel.context_parallel.ring import part_of
from recipes_lib.parallel.context_parallel.ulysses import sent_heads

KINDS = ("ring", "ulysses")

# --- the idea: what a learner can copy ------------------------------------------------------------


def attention_and_sums(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention on some keys, and the log of the sum of exp(scores) of each query.

    q [B, H, Q, E], k and v [B, H, K, E] -> out [B, H, Q, E], log-sum-exp [B, H, Q, 1].
    """
    scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5  # [B, H, Q, K]
    if causal:
        future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    sums = scores.logsumexp(-1, keepdim=True)
    return (scores - sums).exp() @ v, sums


def merge(out: Tensor, sums: Tensor, more: Tensor, more_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Attention on some keys and on others become attention on all of them."""
    both = torch.logaddexp(sums, more_sums)
    return (sums - both).exp() * out + (more_sums - both).exp() * more, both


def ring_by_hand(q: Tensor, k: Tensor, v: Tensor, *, ranks: int) -> Tensor:
    """Causal attention [B, H, S, E] as a ring computes it, all ranks in one process."""
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
    Raises ValueError on every rank, before anything is changed, for a model that is no causal LM,
    is changed already, has a window, a cap or dropout in its attention, or heads that the ranks do
    not divide (Ulysses), for GPUs with a dtype that the ring has no kernel for, and if the ranks
    disagree.
    """
    agree(model=model, kind=kind)
    require_causal_lm(model)
    check_choice(KINDS, kind=kind)
    if mesh is None:
        mesh = default_mesh()
    require_mesh(mesh)
    if mesh.ndim != 1:
        raise ValueError(
            f"the mesh has the dimensions {mesh.mesh_dim_names}: give one of them, as in "
            f"mesh['context']"
        )
    require_attention(model, kind)
    if kind == "ulysses":
        _require_division(model, mesh.size())
    put_into(model, Context(kind, mesh))
    return model


def shard_sequence(
    model: Any,
    input_ids: Tensor,
    labels: Tensor,
    *,
    position_ids: Tensor | None = None,
    tokens: int | None = None,
) -> dict[str, Any]:
    """This rank's part of whole rows [B, S], as arguments of the model's forward.

    The `.loss` of the forward is the sum over this rank's tokens, divided by the tokens of all
    ranks that count. The sum over the ranks is the loss.

    Args:
        model: as `apply_context_parallel` returned it.
        input_ids: [B, S], the same on every rank.
        labels: [B, S] as transformers takes them: not shifted, IGNORED where nothing counts.
        position_ids: [B, S] that restart where a document begins; only for Ulysses.
        tokens: what the sum is divided by; by default the labels of these rows that count. With
            several groups of ranks that have rows of their own, the number of all of them.
    Raises ValueError on every rank for a model without context parallelism, for lengths that the
    ranks do not divide (twice, for the zig-zag of a ring), for documents in a ring, for tensors of
    other shapes, for ranks with different ones, and if no label counts.
    """
    context = context_of(model)
    given = {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}
    shapes = {name: [*tensor.shape] for name, tensor in given.items() if tensor is not None}
    agree(**shapes)
    for name, shape in shapes.items():
        if shape != shapes["input_ids"] or len(shape) != 2:
            raise ValueError(
                f"{name} {shape} beside input_ids {shapes['input_ids']}: give all of them as "
                f"[rows, tokens]"
            )
    rows, seq = input_ids.shape
    _require_parts(seq, context)
    # The token in front of a cut predicts the one behind it, so labels are shifted before the cut.
    targets = torch.cat([labels[:, 1:], labels.new_full((rows, 1), IGNORED)], dim=1)
    if tokens is None:
        tokens = int((targets != IGNORED).sum())
    check_whole(tokens=tokens)
    counting = torch.arange(seq, device=input_ids.device).expand_as(input_ids)
    more: dict[str, Any] = {}
    if position_ids is None:
        position_ids = counting
    elif not torch.equal(position_ids, counting):
        more["documents"] = _documents(position_ids, context)
    mine = context.tokens_of_rank(seq).to(input_ids.device)
    return {
        "input_ids": input_ids[:, mine],
        "labels": targets[:, mine],
        "shift_labels": targets[:, mine],  # transformers would shift `labels` once more
        "position_ids": position_ids[:, mine],
        "num_items_in_batch": tokens,  # what it divides the sum by
        "use_cache": False,
        **more,
    }


def _documents(position_ids: Tensor, context: Context) -> Tensor:
    """The number of its document for each token of whole rows, [B, S]."""
    if context.kind == "ring":
        raise ValueError(
            "positions restart within a row, and a ring does not keep documents apart: take "
            "kind='ulysses', or rows of one document"
        )
    first = position_ids[:, :1] - 1
    return (position_ids.diff(dim=1, prepend=first) != 1).cumsum(dim=1)


def sum_gradients(model: Any) -> None:
    """After backward: the sum over the ranks of each gradient, on all ranks of the sequence.

    With several micro-batches call it once, after the last of them.
    """
    group = context_of(model).group
    works = []
    for parameter in model.parameters():
        if parameter.grad is not None:
            works.append(distributed.all_reduce(parameter.grad, group=group, async_op=True))
    for work in works:
        work.wait()


def loss_of_all(model: Any, loss: Tensor) -> float:
    """The sum of the ranks' parts of the loss, for the log."""
    (total,) = sums_over_ranks(loss.item(), mesh=context_of(model).mesh)
    return total


# --- guards ---------------------------------------------------------------------------------------


def _require_division(model: Any, ranks: int) -> None:
    heads = without_adapters(model).config.num_attention_heads
    if heads % ranks:
        raise ValueError(
            f"{heads} heads do not divide into {ranks} ranks, as Ulysses needs: take kind='ring', "
            f"or a number of ranks that divides them"
        )


def _require_parts(seq: int, context: Context) -> None:
    if seq % context.pieces:
        raise ValueError(
            f"rows of {seq} tokens: {context.kind} over {context.ranks} ranks cuts them into "
            f"{context.pieces} pieces; pad them to a multiple, with labels of -100"
        )


# --- the arithmetic -------------------------------------------------------------------------------


def predicted_ring_work(ranks: int, *, zig_zag: bool = True) -> list[list[float]]:
    """What each rank computes in each step of the ring: [step][rank].

    The unit is attention of all queries of one rank to all keys of another. A step is as long as
    that of its busiest rank. With the zig-zag all ranks have half a unit in every step. Without it
    some have a whole one in every step, and the others wait. Raises ValueError for 0 ranks.
    """
    check_flag(zig_zag=zig_zag)
    check_whole(ranks=ranks)
    steps = []
    for step in range(ranks):
        work = []
        for rank in range(ranks):
            part = part_of(rank, (rank - step) % ranks, zig_zag=zig_zag)
            work.append(part.work)
        steps.append(work)
    return steps


def predicted_sent_bytes(model: Any, shape: Shape, *, ranks: int, kind: str = "ring") -> int:
    """Bytes that one rank sends in a step of the whole rows of `shape`, gradients included.

    An all-to-all of X bytes sends (N-1)/N X, an all-reduce in a ring twice that.
    """
    check_whole(ranks=ranks)
    check_choice(KINDS, kind=kind)
    causal = without_adapters(model)
    query, key, _ = projection_widths(causal.config)
    size = causal.dtype.itemsize
    tokens = shape.tokens * shape.micro_batches // ranks  # of one rank
    away = (ranks - 1) / ranks
    if kind == "ring":
        keys_and_values = 2 * key * tokens
        forward = (ranks - 1) * keys_and_values * size
        # Gradients travel in fp32: they are sums over the ranks. The last step brings them home.
        backward = forward + ranks * keys_and_values * max(size, 4)
        if ranks == 1:
            backward = 0
    else:
        heads = sent_heads(causal.config, ranks)
        head_dim = query // causal.config.num_attention_heads
        forward = away * (2 * query + 2 * heads * head_dim) * tokens * size
        backward = forward
    attention = len(decoder_blocks(model)) * (forward + backward)
    return round(attention + 2 * away * trainable_bytes(model))


@estimate(Order.SHARDING)
def estimate_context_parallel(
    budget: Budget, model: Any, shape: Shape, *, ranks: int, kind: str = "ring"
) -> Budget:
    """The budget of one rank: what grows with tokens is divided by the number of ranks.

    `shape` is that of the whole rows. A ring has beside that the keys and values that arrive, and
    in backward their gradients. Ulysses keeps the output of attention twice, with some heads of all
    tokens and with all heads of some, and keys and values of heads that several ranks share.
    """
    check_whole(ranks=ranks)
    check_choice(KINDS, kind=kind)
    causal = without_adapters(model)
    query, key, _ = projection_widths(causal.config)
    size = causal.dtype.itemsize
    tokens = math.ceil(shape.tokens / ranks)
    in_backward = 0
    kept_twice = 0
    if kind == "ring" and ranks > 1:
        # Arriving keys and values, and three of their gradients: computed, travelling, arriving.
        in_backward = 2 * key * tokens * (size + 3 * max(size, 4))
    if kind == "ulysses" and ranks > 1:
        head_dim = query // causal.config.num_attention_heads
        shared = sent_heads(causal.config, ranks) * head_dim - key
        kept_twice = (query + 2 * shared) * tokens * size
    blocks = len(decoder_blocks(model))
    return budget.change(
        activations=math.ceil(budget.activations / ranks) + blocks * kept_twice,
        loss=math.ceil(budget.loss / ranks),
        one_block=math.ceil(budget.one_block / ranks) + kept_twice,
        block_gradients=math.ceil(budget.block_gradients / ranks) + in_backward,
    )
