"""Pipelines on two and four ranks: the same training, in the predicted order, bytes and time."""

import statistics
import time

import pytest
import torch
from torch import distributed

from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.core.ranks.collectives import sums_over_ranks
from recipes_lib.core.ranks.meshes import mesh_of
from recipes_lib.core.ranks.pipeline_grid import BACKWARD, FORWARD, bubble_of
from recipes_lib.core.ranks.rank_bytes import rank_bytes
from recipes_lib.core.ranks.rank_pool import RankPool
from recipes_lib.core.ranks.rank_step import rank_rows
from recipes_lib.core.ranks.traffic import count_traffic
from recipes_lib.fine_tuning.lora import apply_lora
from recipes_lib.parallel.pipeline_parallel import (
    apply_pipeline_parallel,
    order_of_rank,
    predicted_bubble,
    warm_up_of_rank,
)
from recipes_lib.parallel.pipeline_parallel.arithmetic import predicted_sent_bytes
from recipes_lib.parallel.pipeline_parallel.stage import Stage
from recipes_lib.workflows.on_ranks.plans import kept_in_stages
from tests.parallel.parity import (
    MAX_NORM,
    ROWS,
    TOLERANCE,
    Run,
    counted_tokens,
    global_batch,
    largest_difference,
    loss_sum,
    sgd,
    tiny_model,
    train_alone,
)
from tests.small_models import as_if_trained, small_model

DEEPER = {"num_hidden_layers": 8}

# --- the orders -----------------------------------------------------------------------------------


def order_of_all(schedule, *, ranks, **numbers):
    """The order of each rank."""
    numbers["ranks"] = ranks
    warm_ups = [warm_up_of_rank(schedule, rank, **numbers) for rank in range(ranks)]
    return [order_of_rank(rank, warm_up=warm_ups[rank], **numbers) for rank in range(ranks)]


def place(orders, seconds):
    """The actions of all ranks with their times, if each begins as early as it can."""
    last = max(action.stage for order in orders for action in order)
    waiting = [list(order) for order in orders]
    free_at = [0.0] * len(orders)
    end_of = {None: 0.0}
    placed = []
    while any(waiting):
        before = len(placed)
        for rank, order in enumerate(waiting):
            while order and needed(order[0], last) in end_of:
                action = order.pop(0)
                begin = max(free_at[rank], end_of[needed(action, last)])
                free_at[rank] = begin + seconds(action)
                end_of[action[1:4]] = free_at[rank]
                placed.append(action.at(begin, free_at[rank]))
        assert len(placed) > before, "all ranks wait for each other"
    return placed


def needed(action, last):
    """The action that has to end before this one can begin; None for the very first forward."""
    _, stage, direction, micro_batch, *_ = action
    if direction == FORWARD:
        return None if stage == 0 else (stage - 1, FORWARD, micro_batch)
    if stage == last:
        return stage, FORWARD, micro_batch
    return stage + 1, BACKWARD, micro_batch


def one_and_two(action):
    return 1 if action.direction == FORWARD else 2


@pytest.mark.parametrize(
    ("schedule", "ranks", "micro_batches", "stages"),
    [("gpipe", 4, 8, 1), ("1f1b", 2, 4, 1), ("1f1b", 4, 9, 1), ("interleaved", 4, 8, 3)],
)
def test_the_bubble_of_the_orders_is_that_of_the_formula(schedule, ranks, micro_batches, stages):
    """The mistake: an order with an action in the wrong place. Its grid has more idle time."""
    numbers = {"ranks": ranks, "micro_batches": micro_batches, "stages_per_rank": stages}
    orders = order_of_all(schedule, **numbers)
    assert bubble_of(place(orders, one_and_two)) == pytest.approx(predicted_bubble(**numbers))
    assert [len(set(order)) for order in orders] == [2 * stages * micro_batches] * ranks


# --- training -------------------------------------------------------------------------------------


def of_all_ranks(value):
    """A list of each rank's value."""
    found = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return found


def parameters_of_all(pipeline):
    parts = of_all_ranks({name: value.detach() for name, value in pipeline.named_parameters()})
    return {name: value for part in parts for name, value in part.items()}


def train(schedule, micro_batches, steps, sizes=None):
    """The steps of `train_alone` in a pipeline. Returns a Run, and the order of the last step."""
    model = tiny_model(**(sizes or {}))
    pipeline = apply_pipeline_parallel(model, schedule=schedule, micro_batches=micro_batches)
    optimizer = sgd(pipeline.parameters())
    losses = []
    for step in range(steps):
        losses.append(pipeline.step(**global_batch(step), record=True))
        pipeline.clip_gradients(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return Run(losses, parameters_of_all(pipeline)), pipeline.recorded()


def train_each(cases, **options):
    return [train(schedule, count, **options) for schedule, count in cases]


def assert_in_order(actions, schedule, ranks, micro_batches):
    """The recorded actions are those of the orders by hand, and none began before its input."""
    stages = 2 if schedule == "interleaved" else 1
    numbers = {"ranks": ranks, "micro_batches": micro_batches, "stages_per_rank": stages}
    for rank, order in enumerate(order_of_all(schedule, **numbers)):
        assert [action.at(0.0, 0.0) for action in actions if action.rank == rank] == order
    ends = {action[1:4]: action.end for action in actions} | {None: 0.0}
    last = max(action.stage for action in actions)
    for action in actions:
        assert action.end > action.begin
        # All times are those of rank 0's clock. Earlier by a blink is how exactly they agree.
        assert action.begin >= ends[needed(action, last)] - 1e-3


@pytest.mark.parametrize(
    ("ranks", "cases", "sizes"),
    [
        (2, [("gpipe", 4), ("1f1b", 8), ("interleaved", 4)], {}),
        (4, [("1f1b", 8), ("interleaved", 4)], DEEPER),
    ],
)
def test_all_schedules_train_like_one_process(ranks, cases, sizes, request):
    """The mistakes: gradients divided by micro-batches, a mean over unequal micro-batches, what
    only ranks in the middle do wrong. The orders are those of PyTorch's schedules.
    """
    pool = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[ranks])
    runs = pool.run(train_each, cases=cases, steps=2, sizes=sizes)
    for (schedule, micro_batches), (run, actions) in zip(cases, runs):
        assert largest_difference(run, train_alone(steps=2, **sizes)) < TOLERANCE, schedule
        assert_in_order(actions, schedule, ranks, micro_batches)


def train_two_pipelines():
    """Two pipelines of two ranks side by side, each with half of the rows."""
    mesh = mesh_of(replicate=2, pipeline=2)
    pipeline = apply_pipeline_parallel(tiny_model(), mesh=mesh["pipeline"], micro_batches=2)
    optimizer = sgd(pipeline.parameters())
    losses = []
    for step in range(2):
        batch = global_batch(step)
        tokens = counted_tokens(batch["labels"])
        rows = rank_rows(ROWS, mesh=mesh["replicate"])
        loss = pipeline.step(**{name: ids[rows] for name, ids in batch.items()}, tokens=tokens)
        for parameter in pipeline.parameters():
            distributed.all_reduce(parameter.grad, group=mesh.get_group("replicate"))
        pipeline.clip_gradients(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sums_over_ranks(loss, mesh=mesh["replicate"])[0])
    return Run(losses, parameters_of_all(pipeline))


def test_pipelines_side_by_side(four_ranks):
    """The mistakes: messages to ranks of the other pipeline, a norm of one pipeline's stages."""
    run = four_ranks.run(train_two_pipelines)
    assert largest_difference(run, train_alone(steps=2)) < TOLERANCE


def accumulate_with_tied_weights():
    """Two batches in two calls of `step`, then one update. Returns a Run."""
    pipeline = apply_pipeline_parallel(tiny_model(tie_word_embeddings=True), micro_batches=2)
    optimizer = sgd(pipeline.parameters())
    batches = [global_batch(0), global_batch(1)]
    tokens = sum(counted_tokens(batch["labels"]) for batch in batches)
    loss = sum(pipeline.step(**batch, tokens=tokens) for batch in batches)
    pipeline.clip_gradients(MAX_NORM)
    optimizer.step()
    return Run([loss], parameters_of_all(pipeline))


def test_tied_weights_stay_equal_over_accumulated_batches(two_ranks):
    """The mistakes: copies that drift apart, earlier gradients added twice, and their norm."""
    run = two_ranks.run(accumulate_with_tied_weights)
    head = run.parameters.pop("lm_head.weight")
    torch.testing.assert_close(head, run.parameters["model.embed_tokens.weight"])
    model = tiny_model(tie_word_embeddings=True)
    optimizer = sgd(model.parameters())
    batches = [global_batch(0), global_batch(1)]
    tokens = sum(counted_tokens(batch["labels"]) for batch in batches)
    losses = [loss_sum(model(batch["input_ids"]).logits, batch["labels"]) for batch in batches]
    loss = sum(losses) / tokens
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    alone = Run([loss.item()], {name: value.detach() for name, value in model.named_parameters()})
    assert largest_difference(run, alone) < TOLERANCE


def with_adapters():
    """Adapters on all blocks, as if trained a little: new ones have a gradient of 0 for a half."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        with torch.enable_grad():
            model = apply_lora(tiny_model(tie_word_embeddings=True), rank=4)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def trained(named_parameters):
    return {name: value.grad for name, value in named_parameters if value.requires_grad}


def step_with_adapters():
    """The loss and all gradients of one step."""
    pipeline = apply_pipeline_parallel(with_adapters(), micro_batches=4)
    loss = pipeline.step(**global_batch(0))
    first, second = of_all_ranks(trained(pipeline.named_parameters()))
    return Run([loss], first | second)


def test_adapters_train_in_stages(two_ranks):
    """The mistakes: names that a wrapper changes, gradients of frozen weights that are awaited."""
    model = with_adapters()
    loss = model(**global_batch(0)).loss
    loss.backward()
    alone = Run([loss.item()], trained(model.named_parameters()))
    assert largest_difference(two_ranks.run(step_with_adapters), alone) < TOLERANCE


@pytest.mark.parametrize("family", ["Mistral", "Qwen3"])
def test_stages_in_a_row_are_the_model(family):
    """The mistakes: a family that does something between its blocks, windows of one kind only."""
    options = {"num_hidden_layers": 4, "num_key_value_heads": 2, "sliding_window": 5}
    if family == "Qwen3":
        kinds = ["full_attention", "sliding_attention"] * 2
        options |= {"use_sliding_window": True, "layer_types": kinds}
    model = as_if_trained(small_model(family, **options))
    ids = torch.randint(128, (2, 12))
    hidden = ids
    with torch.no_grad():
        for number in range(4):
            hidden = Stage(model, number, 4)(hidden)
        expected = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(hidden, expected)


def step_on_a_gpu():
    """The loss of one rank whose stage is the whole model, that of the model alone, and actions."""
    batch = {name: ids.cuda() for name, ids in global_batch(0).items()}
    model = tiny_model().cuda()
    alone = model(**batch).loss.item()
    pipeline = apply_pipeline_parallel(model, micro_batches=4)
    return pipeline.step(**batch, record=True), alone, pipeline.recorded()


@pytest.mark.gpu
def test_one_rank_on_a_gpu_trains_and_records():
    """NCCL, and times from events."""
    with RankPool(ranks=1, device="cuda") as pool:
        loss, alone, actions = pool.run(step_on_a_gpu)
    assert loss == pytest.approx(alone, rel=1e-3)
    assert_in_order(actions, "1f1b", 1, 4)


# --- time and bytes -------------------------------------------------------------------------------


class Sleep(torch.autograd.Function):
    """Waits in forward, and twice as long in backward. Sleeping ranks do not share a core."""

    @staticmethod
    def forward(ctx, hidden, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds)
        return gradient, None


def bubble_of_sleepers(schedule, seconds, micro_batches):
    """Of a model whose blocks take equally long, in the better of two steps."""
    model = tiny_model()
    for block in decoder_blocks(model):
        block.register_forward_hook(lambda block, args, hidden: Sleep.apply(hidden, seconds))
    pipeline = apply_pipeline_parallel(model, schedule=schedule, micro_batches=micro_batches)
    bubbles = []
    for step in range(2):
        pipeline.step(**global_batch(step), record=True)
        bubbles.append(bubble_of(pipeline.recorded()))
    # Whoever else computes on this machine makes ranks wait: the same grid by usual seconds.
    kinds = {}
    for action in pipeline.recorded():
        kinds.setdefault((action.stage, action.direction), []).append(action.seconds)
    stages = 2 if schedule == "interleaved" else 1
    orders = order_of_all(schedule, ranks=2, micro_batches=micro_batches, stages_per_rank=stages)
    drawn = place(orders, lambda action: statistics.median(kinds[action[1:3]]))
    return min(bubbles), bubble_of(drawn)


def test_the_measured_bubble_is_the_predicted_one(two_ranks):
    """The mistake: actions that wait for one that they do not need."""
    options = {"schedule": "interleaved", "seconds": 0.025, "micro_batches": 4}
    measured, drawn = two_ranks.run(bubble_of_sleepers, **options)
    expected = predicted_bubble(ranks=2, micro_batches=4, stages_per_rank=2)
    assert drawn == pytest.approx(expected, abs=0.06)
    assert expected - 0.03 < measured < expected + 0.15


def bytes_of_a_step(schedule, tied, stages):
    """For each rank: what it holds, what it sends; and the predictions."""
    model = tiny_model(tie_word_embeddings=tied, vocab_size=128, hidden_size=128)
    place = {"ranks": 2, "rank": distributed.get_rank()}
    options = {"schedule": schedule, "micro_batches": 8}
    predicted = kept_in_stages(model, **place)
    sent = predicted_sent_bytes(model, rows=32, tokens=64, **place, stages_per_rank=stages)
    pipeline = apply_pipeline_parallel(model, **options)
    del model
    optimizer = torch.optim.AdamW(pipeline.parameters())
    batch = global_batch(0, rows=32, tokens=64)
    batch = {name: ids.clamp(max=127) for name, ids in batch.items()}
    pipeline.step(**batch)
    optimizer.step()
    held = rank_bytes(pipeline.stages, optimizer)
    optimizer.zero_grad()
    with count_traffic() as traffic:
        pipeline.step(**batch)
    held = (held.parameters + held.buffers, held.gradients, held.states)
    return of_all_ranks((held, tuple(predicted), traffic.bytes["send"], sent))


@pytest.mark.parametrize(
    ("schedule", "tied", "stages"), [("gpipe", False, 1), ("1f1b", True, 1), ("interleaved", 0, 2)]
)
def test_bytes_are_the_predicted_ones(two_ranks, schedule, tied, stages):
    """The mistakes: weights of other stages that stay, a message too many."""
    options = {"schedule": schedule, "tied": bool(tied), "stages": stages}
    for held, predicted, sent, to_send in two_ranks.run(bytes_of_a_step, **options):
        # AdamW has a counter for each parameter, and all ranks have the frequencies of RoPE.
        assert held == pytest.approx(predicted, rel=1e-3)
        assert sent == to_send


# --- what is refused ------------------------------------------------------------------------------


def call(micro_batches=2, family=None, rows=ROWS, twice=False, wrong_rank=None, **options):
    """`apply_pipeline_parallel` and a step, for what has to be refused."""
    model = tiny_model() if family is None else small_model(family)
    if wrong_rank == distributed.get_rank():
        micro_batches += 2
    pipeline = apply_pipeline_parallel(model, micro_batches=micro_batches, **options)
    if twice:
        apply_pipeline_parallel(model, micro_batches=micro_batches)
    pipeline.step(**global_batch(0, rows=rows))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batches": 3, "schedule": "interleaved"}, "give a multiple of the 2 ranks"),
        ({"stages_per_rank": 3, "schedule": "interleaved"}, "4 blocks do not divide into 6 stages"),
        ({"family": "Gemma2"}, "the family 'gemma2' cannot be cut into stages"),
        ({"twice": True}, "a pipeline has its stages already"),
        ({"rows": 3}, "3 rows: give a multiple of micro_batches=2"),
        ({"wrong_rank": 1}, "micro_batches: rank 0 gives 2, rank 1 gives 4"),
    ],
)
def test_what_cannot_work_is_refused_on_every_rank(two_ranks, options, message):
    """A ValueError here means that all ranks raised it: one alone would be a RankError."""
    with pytest.raises(ValueError, match=message):
        two_ranks.run(call, timeout=30, **options)
