"""What a rank keeps between two steps and what it sends in one, by arithmetic, for each strategy.

plan = plan_of("DDP", model, rows=8, tokens=128, ranks=2)
plan.kept.weights, plan.kept.gradients, plan.kept.states, plan.sent

Of P bytes of weights that all train, and AdamW with two states for each:

    strategy            weights          gradients        states
    DDP, context        P                P                2 P
    ZeRO-1              P                P                2 P / N, in whole parameters
    ZeRO-2, 3, FSDP     P / N            P / N            2 P / N, rows filled up
    HSDP                the same, with N the ranks of one copy
    tensor parallel     P / N, but norms and some biases, which are whole: also of the other two
    pipeline            the rank's own blocks; the first has the embedding, the last the output

A peak is another number: `core.predict.predict(build, ranks=N)` takes the step on tensors without
data.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from recipes_lib.core.checks import check_choice
from recipes_lib.core.model.bytes_of_tensors import trainable_bytes
from recipes_lib.core.ranks.traffic import ring_bytes
from recipes_lib.parallel import (
    context_parallel,
    fully_sharded,
    pipeline_parallel,
    tensor_parallel,
    zero,
)
from recipes_lib.parallel._predicted_bytes import Kept, kept_whole
from recipes_lib.workflows.on_ranks.strategies import STRATEGIES

PAIR = 2  # the ranks of a shard in HSDP, and of a cut in FSDP x TP
OF_PAIRS = ("HSDP", "FSDP × TP")


class RankPlan(NamedTuple):
    """What one rank keeps, and the bytes that it sends in a step."""

    kept: Kept
    sent: int


def plan_of(
    strategy: str, model: Any, *, rows: int, tokens: int, ranks: int, micro_batches: int = 4
) -> RankPlan:
    """The plan of a strategy: what `model`, whole on one rank, keeps and sends for such a batch.

    Raises ValueError for an unknown strategy, and for numbers that it cannot divide.
    """
    check_choice(STRATEGIES, strategy=strategy)
    if strategy in OF_PAIRS and ranks % PAIR != 0:
        raise ValueError(
            f"ranks={ranks}: {strategy} takes pairs of ranks; give a multiple of {PAIR}"
        )
    batch = {"rows": rows, "tokens": tokens}
    if strategy == "one process":
        return RankPlan(kept_whole(model), 0)
    if strategy == "DDP":
        sent = ring_bytes("all_reduce", trainable_bytes(model), ranks)
        return RankPlan(kept_whole(model), round(sent))
    if strategy.startswith("ZeRO"):
        stage = int(strategy.removeprefix("ZeRO-"))
        sent = zero.predicted_sent_bytes(model, stage=stage, ranks=ranks)
        kept = zero.predicted_rank_bytes(model, stage=stage, ranks=ranks)
        return RankPlan(kept, round(sent))
    if strategy in ("FSDP (ZeRO-3)", "HSDP"):
        copies = ranks // PAIR if strategy == "HSDP" else 1
        sent = fully_sharded.predicted_sent_bytes(model, ranks=ranks, copies=copies)
        return RankPlan(fully_sharded.predicted_rank_bytes(model, ranks=ranks // copies), sent)
    if strategy == "tensor parallel":
        tensor_parallel.require_divisible(model, ranks=ranks)
        sent = tensor_parallel.predicted_sent_bytes(model, **batch, ranks=ranks)
        return RankPlan(tensor_parallel.predicted_rank_bytes(model, ranks=ranks), sent)
    if strategy == "FSDP × TP":
        return _sharded_and_cut(model, **batch, shards=ranks // PAIR)
    if strategy.startswith("pipeline"):
        return _in_stages(model, **batch, ranks=ranks, micro_batches=micro_batches)
    kind = "ulysses" if "Ulysses" in strategy else "ring"
    sent = context_parallel.predicted_sent_bytes(model, **batch, ranks=ranks, kind=kind)
    return RankPlan(kept_whole(model), sent)


def _sharded_and_cut(model: Any, *, rows: int, tokens: int, shards: int) -> RankPlan:
    """The plan of FSDP x TP: cut by pairs, then sharded over them; FSDP sends half a model's."""
    cut = tensor_parallel.predicted_rank_bytes(model, ranks=PAIR)
    of_cut = tensor_parallel.predicted_sent_bytes(
        model, rows=rows // shards, tokens=tokens, ranks=PAIR
    )
    of_shards = fully_sharded.predicted_sent_bytes(model, ranks=shards) // PAIR
    return RankPlan(Kept(*[size // shards for size in cut]), of_cut + of_shards)


def _in_stages(model: Any, *, rows: int, tokens: int, ranks: int, micro_batches: int) -> RankPlan:
    """The plan of the pipeline's rank that keeps most."""
    pipeline_parallel.checked_stages(model, "1f1b", ranks, micro_batches, None)
    plans = []
    for rank in range(ranks):
        kept = pipeline_parallel.predicted_rank_bytes(model, ranks=ranks, rank=rank)
        sent = pipeline_parallel.predicted_sent_bytes(
            model, rows=rows, tokens=tokens, ranks=ranks, rank=rank
        )
        plans.append(RankPlan(kept, sent))
    return max(plans, key=_total_of_plan)


def _total_of_plan(plan: RankPlan) -> int:
    return plan.kept.total
