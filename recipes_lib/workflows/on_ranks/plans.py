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
from recipes_lib.core.model.sizes import tensor_bytes, trainable_bytes, weight_bytes
from recipes_lib.parallel import data_parallel, fully_sharded, zero
from recipes_lib.parallel._sharding import part_bytes
from recipes_lib.parallel.context_parallel import arithmetic as by_tokens
from recipes_lib.parallel.pipeline_parallel import arithmetic as by_stages
from recipes_lib.parallel.pipeline_parallel import checked_stages
from recipes_lib.parallel.tensor_parallel import arithmetic as by_cuts
from recipes_lib.parallel.tensor_parallel import require_divisible
from recipes_lib.workflows.on_ranks.strategies import STRATEGIES

PAIR = 2  # the ranks of a shard in HSDP, and of a cut in FSDP x TP
OF_PAIRS = ("HSDP", "FSDP × TP")
STATES = 2  # averages of AdamW for each number that trains


class Kept(NamedTuple):
    """Bytes that a rank has between backward and step, without activations."""

    weights: int
    gradients: int
    states: int

    @property
    def total(self) -> int:
        """All three together."""
        return sum(self)


class RankPlan(NamedTuple):
    """What one rank keeps, and the bytes that it sends in a step."""

    kept: Kept
    sent: int


# --- what a rank keeps ----------------------------------------------------------------------------


def kept_whole(model: Any) -> Kept:
    """One process, and every rank of DDP and of context parallelism."""
    gradients = trainable_bytes(model)
    return Kept(weight_bytes(model), gradients, STATES * gradients)


def kept_by_zero(model: Any, *, stage: int, ranks: int) -> Kept:
    """ZeRO: the states, then the gradients, then the weights are split."""
    return Kept(**zero.predicted_rank_bytes(model, stage=stage, ranks=ranks))


def kept_in_shards(model: Any, *, ranks: int) -> Kept:
    """FSDP: a part of each parameter; `ranks` share one copy of the model."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = part_bytes(trained, ranks)
    return Kept(part_bytes(model.parameters(), ranks), gradients, STATES * gradients)


def kept_of_a_cut(model: Any, *, ranks: int) -> Kept:
    """Tensor parallel: a part of each matrix, and small weights and buffers whole."""
    whole = kept_whole(model)
    small = by_cuts.whole_parameter_bytes(model)
    buffers = sum(tensor_bytes(buffer) for buffer in model.buffers())
    staying = Kept(small + buffers, small, STATES * small)
    parts = []
    for size, stays in zip(whole, staying, strict=True):
        stays = min(stays, size)  # of a frozen norm there is no gradient
        parts.append(stays + (size - stays) // ranks)
    return Kept(*parts)


def kept_in_stages(model: Any, *, ranks: int, rank: int) -> Kept:
    """Pipeline: the blocks of the rank, with an end of the model on the first and on the last."""
    whole = kept_whole(model)
    trained = by_stages.own_share(model, ranks, rank, trained_only=True)
    return Kept(
        round(whole.weights * by_stages.own_share(model, ranks, rank, trained_only=False)),
        round(whole.gradients * trained),
        round(whole.states * trained),
    )


# --- plans ----------------------------------------------------------------------------------------


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
    batch = {"rows": rows, "tokens": tokens}
    if strategy == "one process":
        return RankPlan(kept_whole(model), 0)
    if strategy == "DDP":
        gradients = trainable_bytes(model)
        sent = data_parallel.predicted_sent_bytes(gradient_bytes=gradients, ranks=ranks)
        return RankPlan(kept_whole(model), round(sent))
    if strategy.startswith("ZeRO"):
        stage = int(strategy.removeprefix("ZeRO-"))
        sent = zero.predicted_sent_bytes(model, stage=stage, ranks=ranks)
        return RankPlan(kept_by_zero(model, stage=stage, ranks=ranks), round(sent))
    if strategy in ("FSDP (ZeRO-3)", "HSDP"):
        copies = ranks // PAIR if strategy == "HSDP" else 1
        sent = fully_sharded.predicted_sent_bytes(model, ranks=ranks, copies=copies)
        return RankPlan(kept_in_shards(model, ranks=ranks // copies), sent)
    if strategy == "tensor parallel":
        require_divisible(model, ranks=ranks)
        sent = by_cuts.predicted_sent_bytes(model, **batch, ranks=ranks)
        return RankPlan(kept_of_a_cut(model, ranks=ranks), sent)
    if strategy == "FSDP × TP":
        return _sharded_and_cut(model, **batch, shards=ranks // PAIR)
    if strategy.startswith("pipeline"):
        return _in_stages(model, **batch, ranks=ranks, micro_batches=micro_batches)
    kind = "ulysses" if "Ulysses" in strategy else "ring"
    sent = by_tokens.predicted_sent_bytes(model, **batch, ranks=ranks, kind=kind)
    return RankPlan(kept_whole(model), sent)


def _sharded_and_cut(model: Any, *, rows: int, tokens: int, shards: int) -> RankPlan:
    """First cut by pairs, then sharded over the pairs: what FSDP sends is half a model's."""
    cut = kept_of_a_cut(model, ranks=PAIR)
    of_cut = by_cuts.predicted_sent_bytes(model, rows=rows // shards, tokens=tokens, ranks=PAIR)
    of_shards = fully_sharded.predicted_sent_bytes(model, ranks=shards) // PAIR
    return RankPlan(Kept(*[size // shards for size in cut]), of_cut + of_shards)


def _in_stages(model: Any, *, rows: int, tokens: int, ranks: int, micro_batches: int) -> RankPlan:
    """The plan of the rank that keeps most."""
    checked_stages(model, "1f1b", ranks, micro_batches, None)
    plans = []
    for rank in range(ranks):
        sent = by_stages.predicted_sent_bytes(
            model, rows=rows, tokens=tokens, ranks=ranks, rank=rank
        )
        plans.append(RankPlan(kept_in_stages(model, ranks=ranks, rank=rank), sent))
    return max(plans, key=_total)


def _total(plan: RankPlan) -> int:
    return plan.kept.total
