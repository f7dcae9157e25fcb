"""What one rank of a pipeline keeps and sends, by the order of its actions and by its stages.

PyTorch's schedules keep more than the activations of waiting forwards: buffers for all messages of
a step, and messages that were sent until somebody waits for them.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from recipes_lib.core.checks import check_whole
from recipes_lib.core.model.causal_lm import decoder_blocks, without_adapters
from recipes_lib.core.model.sizes import tensor_bytes
from recipes_lib.core.predict.budget import Budget, Order, Shape, estimate
from recipes_lib.core.predict.plain_step import final_norm_bytes
from recipes_lib.core.ranks.pipeline_grid import FORWARD, Action, most_in_flight
from recipes_lib.parallel.pipeline_parallel import checked_stages, order_of_rank, warm_up_of_rank


def order_of_all(
    schedule: str, *, ranks: int, micro_batches: int, stages_per_rank: int = 1
) -> list[list[Action]]:
    """The order of each rank. PyTorch's schedules run the same orders, as a test shows."""
    numbers = {"ranks": ranks, "micro_batches": micro_batches, "stages_per_rank": stages_per_rank}
    orders = []
    for rank in range(ranks):
        warm_up = warm_up_of_rank(schedule, rank, **numbers)
        orders.append(order_of_rank(rank, warm_up=warm_up, **numbers))
    return orders


def predicted_sent_bytes(
    model: Any, shape: Shape, *, ranks: int, rank: int, stages_per_rank: int = 1
) -> int:
    """Bytes that one rank sends in a step: [B, S, D] over each of its borders, forward and back.

    Together with the gradient of a tied embedding, which the first and the last rank exchange.
    """
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
    Raises ValueError for numbers that `apply_pipeline_parallel` refuses.
    """
    stages_per_rank = checked_stages(model, schedule, ranks, micro_batches, stages_per_rank)
    check_whole(least=0, most=ranks - 1, rank=rank)
    if shape.micro_batches > 1 or shape.rows % micro_batches:
        raise ValueError(f"{shape}: give that of the whole step, with rows that divide evenly")
    numbers = {"ranks": ranks, "micro_batches": micro_batches, "stages_per_rank": stages_per_rank}
    order = order_of_all(schedule, **numbers)[rank]
    is_last = rank == ranks - 1
    stages = ranks * stages_per_rank
    weights = _own_share(model, ranks, rank, trained_only=False)
    trained = _own_share(model, ranks, rank, trained_only=True)

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
    activations = _most_kept(order, schedule, stages, of_stage, message) + arriving * message
    loss = 0
    if is_last:
        in_last_stage = [action for action in order if action.stage == stages - 1]
        waiting = most_in_flight(in_last_stage)
        logits = tokens * model.config.vocab_size
        # A loss that waits keeps the logits, and their log-softmax in fp32. Two fp32 gradients.
        loss = waiting * logits * (model.dtype.itemsize + 4) + 2 * 4 * logits
        activations += waiting * tokens * final_norm_bytes(model)
    gradients = round(budget.gradients * trained)
    return budget.change(
        weights=round(budget.weights * weights),
        states=round(budget.states * trained),
        gradients=gradients,
        carried=gradients if micro_batches > 1 else 0,
        activations=activations,
        loss=loss,
        one_block=one_block,
        block_gradients=budget.block_gradients // micro_batches,
        last_gradients=0,
        embedding_gradient=_table_copy(model, ranks, rank),
    )


def _most_kept(order: list[Action], schedule: str, stages: int, of_stage: int, message: int) -> int:
    """The most bytes that forwards of one rank keep for their backwards, with what has been sent.

    The input of a stage is in the buffer of a message, which is counted elsewhere. Its output is
    kept until backward. Beside that PyTorch keeps sent messages until it waits for them: GPipe for
    gradients at the end of the step, the interleaved schedule for all of them there.
    """
    kept = 0
    most = 0
    for action in order:
        receives = action.stage > 0
        sends = action.stage < stages - 1
        if action.direction == FORWARD:
            kept += of_stage
            if receives:
                kept -= message
            if sends:
                kept += message
        else:
            kept -= of_stage
            if receives:
                kept += message
            if sends and schedule != "interleaved":
                kept -= message
            if receives and schedule != "1f1b":
                kept += message  # the gradient that went back
        most = max(most, kept)
    return most


def _own_share(model: Any, ranks: int, rank: int, *, trained_only: bool) -> float:
    """The part of the model's bytes that one rank holds; a tied weight is held by two ranks."""
    causal = without_adapters(model)
    blocks = _bytes_of(decoder_blocks(model), trained_only)
    first = _bytes_of(causal.get_input_embeddings(), trained_only)
    last = _bytes_of(causal.get_output_embeddings(), trained_only)
    whole = _bytes_of(model, trained_only)
    own = blocks / ranks
    if rank == 0:
        own += first
    if rank == ranks - 1:
        # All that is neither a block nor the embedding: the norm, and an untied output layer.
        own += whole - blocks - first
        tied = causal.get_input_embeddings().weight is causal.get_output_embeddings().weight
        if tied and ranks > 1:
            own += last
    return own / max(whole, 1)


def _bytes_of(module: nn.Module, trained_only: bool) -> int:
    total = 0
    for parameter in module.parameters():
        if parameter.requires_grad or not trained_only:
            total += tensor_bytes(parameter)
    return total


def _table_copy(model: Any, ranks: int, rank: int) -> int:
    """The gradient of a table [V, D] by one micro-batch, before it is added to the others."""
    causal = without_adapters(model)
    tables = []
    if rank == 0:
        tables.append(causal.get_input_embeddings().weight)
    if rank == ranks - 1:
        tables.append(causal.get_output_embeddings().weight)
    return max([tensor_bytes(table) for table in tables if table.requires_grad], default=0)
