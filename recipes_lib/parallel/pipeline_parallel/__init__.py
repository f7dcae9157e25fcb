"""Pipeline parallelism: each rank has some of the blocks, and micro-batches flow through them.

Problem    A model does not fit one GPU, and the link to the next one is slow, as between two hosts.
Idea       Cut the model between blocks into stages, and the batch into micro-batches, so that all
           ranks have work. A schedule is an order of forwards (F) and backwards (B) for each rank:

               GPipe   rank 0   F0 F1 F2 F3  .  . B0 B1 B2 B3     all forwards first
                       rank 1    . F0 F1 F2 F3 B0 B1 B2 B3  .
               1F1B    rank 0   F0 F1  . B0 F2 B1 F3 B2  . B3     one of each in turns
                       rank 1    . F0 B0 F1 B1 F2 B2 F3 B3  .

           Interleaved: each rank has several thinner stages, and waits a thinner stage's time.
Saves      Weights, gradients and states of the other stages. What is sent is small: one [B/M, S, D]
           for each border and micro-batch, forward and back.
Costs      The bubble, the idle part of the time: (P-1) / (V M + P-1) for P ranks, M micro-batches
           and V stages on each rank. GPipe keeps the activations of M micro-batches, 1F1B those of
           P at most.
Use when   The model needs several hosts, or GPUs without a fast link, and M is several times P.
Not when   Sharding (FSDP) fits and its traffic hides behind compute; few micro-batches; P does not
           divide the blocks.
In production   `torch.distributed.pipelining`, which runs here; torchtitan
           `parallelism.pipeline_parallel_degree`; Megatron-LM `--pipeline-model-parallel-size`.
Source     Huang et al., "GPipe" (arXiv 1811.06965); Narayanan et al., PipeDream-Flush (2006.09503)
           and "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
           (2104.04473), which has the interleaved schedule.

Traps, and what happens here:

- PyTorch's schedules divide gradients by M, because they expect a mean over each micro-batch. With
  unequal numbers of labels that is another loss. Here each loss is a sum over the global number.
- They keep the logits of all micro-batches, to return them, unless `return_outputs=False`.
- A tied embedding is on the first and on the last rank. Their gradients are added, or the two
  copies would drift apart.
- `clip_grad_norm_` on one rank sees one stage. `Pipeline.clip_gradients` sees the norm of all.

A step is in run.py, a stage in stage.py, the times of actions
in clock.py, and what a rank keeps in arithmetic.py.

Shapes: B batch, M micro-batches, S sequence, D hidden; P ranks, V stages on each.

arithmetic  what a rank keeps, by the order of its actions and its stages
clock  when each action of a pipeline began and ended
run  the stages of one rank, run by PyTorch's schedule
stage  some blocks of a model as a module of their own
"""

from __future__ import annotations

from typing import Any

from recipes_lib.core.checks import check_choice, check_whole
from recipes_lib.core.model.causal_lm import decoder_blocks, require_causal_lm, without_adapters
from recipes_lib.core.model.sizes import tensor_bytes
from recipes_lib.core.predict.budget import Budget, Order, Shape, estimate
from recipes_lib.core.predict.plain_step import final_norm_bytes
from recipes_lib.core.ranks.agreement import agree
from recipes_lib.core.ranks.meshes import default_mesh, require_mesh
from recipes_lib.core.ranks.pipeline_grid import BACKWARD, FORWARD, Action, most_in_flight
from recipes_lib.parallel.pipeline_parallel.arithmetic import most_kept, own_share, table_copy
from recipes_lib.parallel.pipeline_parallel.run import Pipeline
from recipes_lib.parallel.pipeline_parallel.stage import require_family, require_whole

SCHEDULES = ("gpipe", "1f1b", "interleaved")

# --- the idea: what a learner can copy ------------------------------------------------------------


def order_of_rank(
    rank: int, *, ranks: int, micro_batches: int, stages_per_rank: int = 1, warm_up: int
) -> list[Action]:
    """What one rank computes, in order: some forwards, one of each in turns, then the rest.

    `warm_up` is the number of forwards before the first backward comes, and it alone tells GPipe
    from 1F1B. A rank with several stages takes as many micro-batches as there are ranks through its
    first stage, then the same ones through its next stage, then the next micro-batches.
    """
    forwards = []
    backwards = []
    for start in range(0, micro_batches, ranks):
        group = range(start, min(start + ranks, micro_batches))
        stages = [rank + number * ranks for number in range(stages_per_rank)]
        for stage in stages:
            forwards += [Action(rank, stage, FORWARD, micro_batch) for micro_batch in group]
        for stage in reversed(stages):
            backwards += [Action(rank, stage, BACKWARD, micro_batch) for micro_batch in group]
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards):
        order += [forward, backward]
    return order + backwards[len(forwards) - warm_up :]


def warm_up_of_rank(
    schedule: str, rank: int, *, ranks: int, micro_batches: int, stages_per_rank: int = 1
) -> int:
    """How many forwards a rank computes before its turns of one forward and one backward begin."""
    forwards = micro_batches * stages_per_rank
    ranks_behind = ranks - 1 - rank
    if schedule == "gpipe":
        return forwards
    if schedule == "1f1b":
        return min(forwards, ranks_behind)
    # The first micro-batches go through all stages of the rank but the last one. Then their way to
    # the last rank and back takes two actions for each rank behind.
    return min(forwards, (stages_per_rank - 1) * ranks + 2 * ranks_behind)


def order_of_all(
    schedule: str, *, ranks: int, micro_batches: int, stages_per_rank: int | None = None
) -> list[list[Action]]:
    """The order of each rank. PyTorch's schedules run the same orders, as a test shows.

    Raises ValueError for an unknown schedule and for numbers that it cannot work with.
    """
    stages_per_rank = _checked_stages(schedule, stages_per_rank)
    _check_micro_batches(schedule, ranks, micro_batches)
    numbers = {
        "ranks": ranks,
        "micro_batches": micro_batches,
        "stages_per_rank": stages_per_rank,
    }
    orders = []
    for rank in range(ranks):
        warm_up = warm_up_of_rank(schedule, rank, **numbers)
        orders.append(order_of_rank(rank, warm_up=warm_up, **numbers))
    return orders


# --- the technique --------------------------------------------------------------------------------


def apply_pipeline_parallel(
    model: Any,
    *,
    mesh: Any = None,
    schedule: str = "1f1b",
    micro_batches: int,
    stages_per_rank: int | None = None,
) -> Pipeline:
    """Take the model apart: this rank keeps its stages, and drops the weights of all others.

    Every rank of `mesh` calls it with the same model. Stage s is on rank s modulo P. Train what it
    returns, and make the optimizer from its parameters:

        pipeline = apply_pipeline_parallel(model, micro_batches=8)
        optimizer = torch.optim.AdamW(pipeline.parameters())
        loss = pipeline.step(input_ids, labels)      # the whole batch [B, S] on every rank

    Args:
        mesh: one dimension, the ranks of the pipeline; by default all ranks.
        schedule: one of SCHEDULES.
        micro_batches: into how many the batch of a step is cut.
        stages_per_rank: by default 2 for "interleaved"; the other schedules have 1.
    Raises ValueError on every rank, before anything is changed, for a model of another family than
    FAMILIES, for one that is in a pipeline already, for blocks that do not divide, for a first
    stage in which nothing trains, for a number of micro-batches that the schedule cannot work with,
    and if the ranks disagree.
    """
    # A rank that raises alone would leave the others waiting.
    agree(
        model=model,
        schedule=schedule,
        micro_batches=micro_batches,
        stages_per_rank=stages_per_rank,
    )
    require_causal_lm(model)
    check_choice(SCHEDULES, schedule=schedule)
    check_whole(micro_batches=micro_batches)
    if mesh is None:
        mesh = default_mesh()
    _require_one_dimension(mesh)
    stages_per_rank = _checked_stages(schedule, stages_per_rank)
    _check_micro_batches(schedule, mesh.size(), micro_batches)
    require_family(model)
    require_whole(model)
    _require_division(model, mesh.size(), stages_per_rank)
    _require_training(model, mesh.size() * stages_per_rank)
    return Pipeline(model, mesh, schedule, micro_batches, stages_per_rank)


# --- guards ---------------------------------------------------------------------------------------


def _require_one_dimension(mesh: Any) -> None:
    require_mesh(mesh)
    if mesh.ndim != 1:
        raise ValueError(
            f"the mesh has the dimensions {mesh.mesh_dim_names}: give one of them, as in "
            f"mesh['pipeline']"
        )


def _checked_stages(schedule: str, stages_per_rank: int | None) -> int:
    """The number of stages on each rank, that of the schedule if none was given."""
    check_choice(SCHEDULES, schedule=schedule)
    if schedule == "interleaved":
        if stages_per_rank is None:
            return 2
        check_whole(least=2, stages_per_rank=stages_per_rank)
        return stages_per_rank
    if stages_per_rank not in (None, 1):
        raise ValueError(
            f"stages_per_rank={stages_per_rank!r}: {schedule} has one stage on each rank; take "
            f"schedule='interleaved' for more"
        )
    return 1


def _check_micro_batches(schedule: str, ranks: int, micro_batches: int) -> None:
    check_whole(ranks=ranks, micro_batches=micro_batches)
    if schedule == "1f1b" and micro_batches < ranks:
        raise ValueError(
            f"micro_batches={micro_batches}: give at least as many as there are ranks, {ranks}, or "
            f"take schedule='gpipe'"
        )
    if schedule == "interleaved" and micro_batches % ranks:
        raise ValueError(
            f"micro_batches={micro_batches}: the interleaved schedule takes them in groups of as "
            f"many as there are ranks; give a multiple of {ranks}"
        )


def _require_division(model: Any, ranks: int, stages_per_rank: int) -> None:
    blocks = len(decoder_blocks(model))
    stages = ranks * stages_per_rank
    if blocks % stages:
        raise ValueError(
            f"{blocks} blocks do not divide into {stages} stages ({ranks} ranks with "
            f"{stages_per_rank} each): give a number of ranks and of stages that divides them"
        )


def _require_training(model: Any, stages: int) -> None:
    """PyTorch runs backward in each stage, and in a frozen first one there is nothing to run."""
    blocks = decoder_blocks(model)
    embedding = without_adapters(model).get_input_embeddings()
    first = [embedding, *blocks[: len(blocks) // stages]]
    if not any(parameter.requires_grad for module in first for parameter in module.parameters()):
        raise ValueError(
            f"nothing trains in the first of {stages} stages, the embedding and "
            f"{len(blocks) // stages} blocks: train something there, or take fewer stages"
        )


# --- the arithmetic -------------------------------------------------------------------------------


def predicted_bubble(*, ranks: int, micro_batches: int, stages_per_rank: int = 1) -> float:
    """The idle part of the time of all ranks, (P-1) / (V M + P-1), if all stages take equally long.

    GPipe and 1F1B have the same bubble. Sending takes no time here. Raises ValueError for numbers
    below 1.
    """
    check_whole(ranks=ranks, micro_batches=micro_batches, stages_per_rank=stages_per_rank)
    return (ranks - 1) / (stages_per_rank * micro_batches + ranks - 1)


def predicted_sent_bytes(
    model: Any, shape: Shape, *, ranks: int, rank: int, stages_per_rank: int = 1
) -> int:
    """Bytes that one rank sends in a step: [B, S, D] over each of its borders, forward and back.

    Together with the gradient of a tied embedding, which the first and the last rank exchange.
    """
    check_whole(ranks=ranks, stages_per_rank=stages_per_rank)
    check_whole(least=0, most=ranks - 1, rank=rank)
    if ranks == 1:
        return 0
    causal = without_adapters(model)
    tokens = shape.tokens * shape.micro_batches
    hidden = tokens * causal.config.hidden_size * causal.dtype.itemsize
    borders = 2 * stages_per_rank
    if rank == 0:
        borders -= 1  # nothing goes back from the first stage
    if rank == ranks - 1:
        borders -= 1  # nothing goes on from the last stage
    sent = borders * hidden
    embedding = causal.get_input_embeddings().weight
    tied = embedding is causal.get_output_embeddings().weight
    if tied and embedding.requires_grad and rank in (0, ranks - 1):
        sent += tensor_bytes(embedding)
    return sent


@estimate(Order.SHARDING)
def estimate_pipeline_parallel(
    budget: Budget,
    model: Any,
    shape: Shape,
    *,
    ranks: int,
    micro_batches: int,
    schedule: str = "1f1b",
    stages_per_rank: int | None = None,
    rank: int = 0,
) -> Budget:
    """The budget of one rank of a pipeline. The fullest is `rank` 0, or the last one by its logits.

    `shape` is the whole batch of a step in one pass: the pipeline cuts it into its micro-batches.
    Raises ValueError for numbers that `apply_pipeline_parallel` refuses, and for a shape that has
    micro-batches already.
    """
    stages_per_rank = _checked_stages(schedule, stages_per_rank)
    _check_micro_batches(schedule, ranks, micro_batches)
    check_whole(least=0, most=ranks - 1, rank=rank)
    _require_division(model, ranks, stages_per_rank)
    _require_one_pass(shape, micro_batches)
    numbers = {
        "ranks": ranks,
        "micro_batches": micro_batches,
        "stages_per_rank": stages_per_rank,
    }
    order = order_of_all(schedule, **numbers)[rank]
    is_last = rank == ranks - 1
    stages = ranks * stages_per_rank
    weights = own_share(model, ranks, rank, trained_only=False)
    trained = own_share(model, ranks, rank, trained_only=True)

    tokens = shape.tokens // micro_batches  # of one micro-batch
    one_block = budget.one_block // micro_batches
    message = tokens * without_adapters(model).config.hidden_size * model.dtype.itemsize
    of_stage = len(decoder_blocks(model)) // stages * one_block
    # PyTorch has a buffer for each message that arrives in a step, and keeps it for the next one.
    arriving = 2 * stages_per_rank * micro_batches
    if rank == 0:
        arriving -= micro_batches
    if is_last:
        arriving -= micro_batches
    activations = most_kept(order, schedule, stages, of_stage, message) + arriving * message
    loss = 0
    if is_last:
        in_last_stage = [action for action in order if action.stage == stages - 1]
        waiting = most_in_flight(in_last_stage)
        logits = tokens * model.config.vocab_size
        # A loss that waits keeps the logits, and their log-softmax in fp32. Two fp32 gradients.
        loss = waiting * logits * (model.dtype.itemsize + 4) + 2 * 4 * logits
        activations += waiting * tokens * final_norm_bytes(model)
    gradients = round(budget.gradients * trained)
    carried = 0
    if micro_batches > 1:
        carried = gradients
    return budget.change(
        weights=round(budget.weights * weights),
        states=round(budget.states * trained),
        gradients=gradients,
        carried=carried,
        activations=activations,
        loss=loss,
        one_block=one_block,
        block_gradients=budget.block_gradients // micro_batches,
        last_gradients=0,
        embedding_gradient=table_copy(model, ranks, rank),
    )


def _require_one_pass(shape: Shape, micro_batches: int) -> None:
    if shape.micro_batches > 1 or shape.rows % micro_batches:
        raise ValueError(
            f"{shape} and micro_batches={micro_batches}: give the shape of the whole step with "
            f"micro_batches=1, and rows that the pipeline can cut evenly"
        )
