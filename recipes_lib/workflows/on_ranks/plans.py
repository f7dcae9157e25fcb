"""What arithmetic expects of a strategy: the budget of one rank, and the bytes that it sends.

plan = plan_of("DDP", model, rows=8, tokens=128, ranks=2)
plan.budget.weights, plan.budget.gradients, plan.budget.states, plan.sent
"""

from __future__ import annotations

from typing import Any, NamedTuple

from recipes_lib.core.checks import check_choice
from recipes_lib.core.predict.budget import Budget, Shape
from recipes_lib.core.predict.plain_step import budget_of, trainable_bytes
from recipes_lib.parallel import (
    data_parallel,
    fully_sharded,
    zero,
)
from recipes_lib.parallel.context_parallel import arithmetic as context_arithmetic
from recipes_lib.parallel.pipeline_parallel import arithmetic as pipeline_arithmetic
from recipes_lib.parallel.tensor_parallel import arithmetic as tensor_parallel_arithmetic
from recipes_lib.workflows.on_ranks.strategies import STRATEGIES

PAIR = 2  # the ranks of a shard in HSDP, and of a cut in FSDP x TP
OF_PAIRS = ("HSDP", "FSDP × TP")


class RankPlan(NamedTuple):
    """The budget of one rank, and the bytes that it sends in a step."""

    budget: Budget
    sent: int


def plan_of(
    strategy: str, model: Any, *, rows: int, tokens: int, ranks: int, micro_batches: int = 4
) -> RankPlan:
    """The plan of `model`, which is whole and on one rank, for a batch of `rows` x `tokens`.

    Raises ValueError for an unknown strategy, and for numbers that it cannot divide.
    """
    check_choice(STRATEGIES, strategy=strategy)
    if strategy in OF_PAIRS and ranks % PAIR != 0:
        raise ValueError(
            f"ranks={ranks}: {strategy} takes pairs of ranks; give a multiple of {PAIR}"
        )
    together = Shape(batch=rows, seq=tokens)  # all rows on each rank
    if strategy == "one process":
        return RankPlan(budget_of(model, together), 0)
    if strategy == "tensor parallel":
        return _cut(model, together, ranks)
    if strategy.startswith("pipeline"):
        return _in_stages(model, together, ranks, micro_batches)
    if strategy.startswith("context parallel"):
        kind = "ulysses" if "Ulysses" in strategy else "ring"
        return _by_tokens(model, together, ranks, kind)
    if strategy == "FSDP × TP":
        return _sharded_and_cut(model, Shape(batch=rows, seq=tokens, ranks=ranks // PAIR))
    return _by_rows(strategy, model, Shape(batch=rows, seq=tokens, ranks=ranks))


def _by_rows(strategy: str, model: Any, shape: Shape) -> RankPlan:
    """DDP, ZeRO, FSDP and HSDP: each rank has rows of its own."""
    plain = budget_of(model, shape)
    gradients = trainable_bytes(model)
    if strategy == "DDP":
        budget = data_parallel.estimate_data_parallel(plain, model, shape)
        sent = data_parallel.predicted_sent_bytes(gradient_bytes=gradients, ranks=shape.ranks)
        return RankPlan(budget, round(sent))
    if strategy.startswith("ZeRO"):
        stage = int(strategy.removeprefix("ZeRO-"))
        budget = zero.estimate_zero(plain, model, shape, stage=stage)
        # The budget is that of the peak, when a part of the weights is whole. A rank keeps less.
        kept = zero.predicted_rank_bytes(model, stage=stage, ranks=shape.ranks)
        budget = budget.change(**kept)
        sent = zero.predicted_sent_bytes(model, stage=stage, ranks=shape.ranks)
        return RankPlan(budget, round(sent))
    copies = 1
    if strategy == "HSDP":
        copies = shape.ranks // PAIR
    budget = fully_sharded.estimate_fully_sharded(plain, model, shape, copies=copies)
    sent = fully_sharded.predicted_sent_bytes(model, ranks=shape.ranks, copies=copies)
    return RankPlan(budget, sent)


def _cut(model: Any, shape: Shape, ranks: int) -> RankPlan:
    plain = budget_of(model, shape)
    budget = tensor_parallel_arithmetic.estimate_tensor_parallel(plain, model, shape, ranks=ranks)
    sent = tensor_parallel_arithmetic.predicted_sent_bytes(model, shape, ranks=ranks)
    return RankPlan(budget, sent)


def _in_stages(model: Any, shape: Shape, ranks: int, micro_batches: int) -> RankPlan:
    """The plan of the rank that keeps most."""
    plain = budget_of(model, shape)
    plans = []
    for rank in range(ranks):
        budget = pipeline_arithmetic.estimate_pipeline_parallel(
            plain,
            model,
            shape,
            ranks=ranks,
            micro_batches=micro_batches,
            rank=rank,
        )
        sent = pipeline_arithmetic.predicted_sent_bytes(model, shape, ranks=ranks, rank=rank)
        plans.append(RankPlan(budget, sent))
    return max(plans, key=_kept)


def _kept(plan: RankPlan) -> int:
    return plan.budget.weights + plan.budget.gradients + plan.budget.states


def _by_tokens(model: Any, shape: Shape, ranks: int, kind: str) -> RankPlan:
    budget = context_arithmetic.estimate_context_parallel(
        budget_of(model, shape), model, shape, ranks=ranks, kind=kind
    )
    sent = context_arithmetic.predicted_sent_bytes(model, shape, ranks=ranks, kind=kind)
    return RankPlan(budget, sent)


def _sharded_and_cut(model: Any, shape: Shape) -> RankPlan:
    """First cut by pairs, then sharded over the pairs: what FSDP sends is half a model's."""
    plain = budget_of(model, shape)
    budget = tensor_parallel_arithmetic.estimate_tensor_parallel(plain, model, shape, ranks=PAIR)
    of_cut = tensor_parallel_arithmetic.predicted_sent_bytes(model, shape, ranks=PAIR)
    of_shards = fully_sharded.predicted_sent_bytes(model, ranks=shape.ranks) // PAIR
    parts = {
        "weights": budget.weights // shape.ranks,
        "gradients": budget.gradients // shape.ranks,
        "states": budget.states // shape.ranks,
    }
    return RankPlan(budget.change(**parts), of_cut + of_shards)
