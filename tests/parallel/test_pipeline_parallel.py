"""Pipelines on two and four ranks: the same training, in the predicted order, bytes and time."""

import time

import pytest
import torch
from torch import distributed

from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.model.causal_lm import decoder_blocks
from recipes_lib.core.predict.budget import Shape
from recipes_lib.core.predict.plain_step import budget_of
from recipes_lib.core.ranks.collectives import sums_over_ranks
from recipes_lib.core.ranks.launch import launch
from recipes_lib.core.ranks.meshes import mesh_of
from recipes_lib.core.ranks.pipeline_grid import (
    BACKWARD,
    FORWARD,
    bubble_of,
    median_seconds,
    most_in_flight,
    place,
)
from recipes_lib.core.ranks.rank_bytes import rank_bytes
from recipes_lib.core.ranks.rank_rows import rank_rows
from recipes_lib.core.ranks.traffic import count_traffic
from recipes_lib.fine_tuning.lora import apply_lora
from recipes_lib.parallel.pipeline_parallel import (
    apply_pipeline_parallel,
    estimate_pipeline_parallel,
    order_of_all,
    predicted_bubble,
    predicted_sent_bytes,
)
from recipes_lib.parallel.pipeline_parallel.stage import FAMILIES, Stage
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

# --- what the ranks do ----------------------------------------------------------------------------


def of_all_ranks(value):
    """A list of each rank's value."""
    found = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return found


def train(schedule, micro_batches, steps=3, sizes=None, **options):
    """The steps of `train_alone` in a pipeline. Returns a Run, and the order of the last step."""
    model = tiny_model(**(sizes or {}))
    pipeline = apply_pipeline_parallel(
        model, schedule=schedule, micro_batches=micro_batches, **options
    )
    optimizer = sgd(pipeline.parameters())
    losses = []
    for step in range(steps):
        losses.append(pipeline.step(**global_batch(step), record=True))
        pipeline.clip_gradients(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    parts = of_all_ranks({name: value.detach() for name, value in pipeline.named_parameters()})
    parameters = {name: value for part in parts for name, value in part.items()}
    return Run(losses, parameters), pipeline.recorded()


def train_in_all_schedules(steps):
    """One run each; the last one in more stages than there are ranks."""
    return {
        "gpipe": train("gpipe", 4, steps),
        "1f1b": train("1f1b", 8, steps),
        "interleaved": train("interleaved", 4, steps),
    }


def train_on_four_ranks():
    deeper = {"num_hidden_layers": 8}
    return {
        "1f1b": train("1f1b", 8, 2, deeper),
        "interleaved": train("interleaved", 4, 2, deeper),
    }


def accumulate_with_tied_weights():
    """Two batches in two calls of `step`, then one update. Returns a Run."""
    pipeline = apply_pipeline_parallel(tiny_model(tie_word_embeddings=True), micro_batches=2)
    optimizer = sgd(pipeline.parameters())
    losses = []
    for first in (0, 2):
        batches = [global_batch(first), global_batch(first + 1)]
        tokens = sum(counted_tokens(batch["labels"]) for batch in batches)
        losses.append(sum(pipeline.step(**batch, tokens=tokens) for batch in batches))
        pipeline.clip_gradients(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    parts = of_all_ranks({name: value.detach() for name, value in pipeline.named_parameters()})
    return Run(losses, parts[0] | parts[1])


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
        mine = {name: value[rows] for name, value in batch.items()}
        loss = pipeline.step(**mine, tokens=tokens)
        for parameter in pipeline.parameters():
            distributed.all_reduce(parameter.grad, group=mesh.get_group("replicate"))
        pipeline.clip_gradients(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sums_over_ranks(loss, mesh=mesh["replicate"])[0])
    parts = of_all_ranks({name: value.detach() for name, value in pipeline.named_parameters()})
    return Run(losses, parts[0] | parts[1])


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


def bubbles_of_sleepers(seconds, micro_batches):
    """For each schedule of a model whose blocks take equally long: the measured bubble, and that
    of the schedule with the measured seconds of its stages.
    """

    def slow_down(block, args, hidden):
        return Sleep.apply(hidden, seconds)

    bubbles = {}
    for schedule in ("1f1b", "interleaved"):
        model = tiny_model()
        for block in decoder_blocks(model):
            block.register_forward_hook(slow_down)
        pipeline = apply_pipeline_parallel(model, schedule=schedule, micro_batches=micro_batches)
        found = []
        for step in range(2):
            pipeline.step(**global_batch(step), record=True)
            found.append(bubble_of(pipeline.recorded()))
        orders = order_of_all(schedule, ranks=2, micro_batches=micro_batches)
        drawn = place(orders, seconds=median_seconds(pipeline.recorded()))
        # The least: whoever else computes on this machine makes ranks wait.
        bubbles[schedule] = (min(found), bubble_of(drawn))
    return bubbles


def bytes_of_a_step(schedule, tied):
    """For each rank: what it holds, the peak of a step, what it sends; and the predictions."""
    with PeakMemory() as memory:
        others = memory.current
    model = tiny_model(tie_word_embeddings=tied, vocab_size=128, hidden_size=128)
    shape = Shape(batch=32, seq=64)
    whole = budget_of(model, shape)
    rank = distributed.get_rank()
    options = {"schedule": schedule, "micro_batches": 8}
    budget = estimate_pipeline_parallel(whole, model, shape, ranks=2, rank=rank, **options)
    sent = predicted_sent_bytes(model, shape, ranks=2, rank=rank)
    if schedule == "interleaved":
        sent = predicted_sent_bytes(model, shape, ranks=2, rank=rank, stages_per_rank=2)
    pipeline = apply_pipeline_parallel(model, **options)
    del model
    optimizer = torch.optim.AdamW(pipeline.parameters())
    batch = global_batch(0, rows=32, tokens=64)
    batch = {name: ids.clamp(max=127) for name, ids in batch.items()}
    pipeline.step(**batch)
    optimizer.step()
    held = rank_bytes(pipeline.stages, optimizer)
    optimizer.zero_grad()
    with PeakMemory() as memory, count_traffic() as traffic:
        pipeline.step(**batch)
    return of_all_ranks(
        {
            "held": (held.parameters + held.buffers, held.gradients, held.states),
            "predicted": (budget.weights, budget.gradients, budget.states),
            "peak": memory.peak - others,
            "predicted peak": budget.peak,
            "sent": traffic.bytes["send"],
            "predicted sent": sent,
        }
    )


def step_on_a_gpu(device="cuda"):
    """The loss of one rank whose stage is the whole model, that of the model alone, and actions."""
    batch = {name: ids.to(device) for name, ids in global_batch(0).items()}
    model = tiny_model().to(device)
    alone = loss_sum(model(batch["input_ids"]).logits, batch["labels"]).item()
    pipeline = apply_pipeline_parallel(model, micro_batches=4)
    loss = pipeline.step(**batch, record=True)
    return loss, alone / counted_tokens(batch["labels"]), pipeline.recorded()


def call(micro_batches=2, make=tiny_model, rows=ROWS, twice=False, wrong_rank=None, **options):
    """`apply_pipeline_parallel` and a step, for what has to be refused."""
    model = make()
    before = {name: value.device.type for name, value in model.named_parameters()}
    if wrong_rank == distributed.get_rank():
        micro_batches += 2
    try:
        pipeline = apply_pipeline_parallel(model, micro_batches=micro_batches, **options)
        if twice:
            apply_pipeline_parallel(model, micro_batches=micro_batches)
        pipeline.step(**global_batch(0, rows=rows))
    except ValueError:
        if not twice and rows == ROWS:
            after = {name: value.device.type for name, value in model.named_parameters()}
            assert after == before, "refused, and changed all the same"
        raise


def steps_that_are_refused():
    """The text of each refusal of one pipeline, which goes on working."""
    pipeline = apply_pipeline_parallel(tiny_model(), micro_batches=2)
    good = global_batch(0)
    other = dict(good)
    if distributed.get_rank() == 1:
        other = global_batch(0, rows=4)
    nothing = dict(good, labels=torch.full_like(good["labels"], -100))
    short = dict(good, labels=good["labels"][:, 1:])
    found = []
    for batch in (other, nothing, short, dict(good, tokens=0)):
        try:
            pipeline.step(**batch)
        except ValueError as error:
            found.append(str(error))
    try:
        pipeline.recorded()
    except ValueError as error:
        found.append(str(error))
    return found, pipeline.step(**good)


def gemma():
    return small_model("Gemma2")


def with_a_frozen_half():
    model = tiny_model()
    for module in (model.model.embed_tokens, *model.model.layers[:2]):
        module.requires_grad_(False)
    return model


def with_adapters():
    """Adapters on all blocks, as if trained a little: new ones have a gradient of 0 for a half."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = apply_lora(tiny_model(tie_word_embeddings=True), rank=4)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def step_with_adapters():
    """The loss and all gradients of one step."""
    pipeline = apply_pipeline_parallel(with_adapters(), micro_batches=4)
    loss = pipeline.step(**global_batch(0))
    trained = [(name, value) for name, value in pipeline.named_parameters() if value.requires_grad]
    parts = of_all_ranks({name: value.grad for name, value in trained})
    return Run([loss], parts[0] | parts[1])


def with_three_blocks():
    return tiny_model(num_hidden_layers=3)


# --- the schedules --------------------------------------------------------------------------------


SHAPES = [
    ("gpipe", 2, 3, 1),
    ("gpipe", 4, 8, 1),
    ("1f1b", 2, 4, 1),
    ("1f1b", 4, 9, 1),
    ("interleaved", 2, 4, 2),
    ("interleaved", 4, 8, 3),
    ("interleaved", 8, 32, 2),
]


@pytest.mark.parametrize(("schedule", "ranks", "micro_batches", "stages"), SHAPES)
def test_the_bubble_of_the_orders_is_that_of_the_formula(schedule, ranks, micro_batches, stages):
    """Catches an order with an action in the wrong place: its grid would have more idle time."""
    numbers = {"ranks": ranks, "micro_batches": micro_batches, "stages_per_rank": stages}
    orders = order_of_all(schedule, **numbers)
    grid = place(orders, seconds=lambda action: 1 if action.direction == FORWARD else 2)
    assert bubble_of(grid) == pytest.approx(predicted_bubble(**numbers))
    for rank, order in enumerate(orders):
        assert len(set(order)) == 2 * stages * micro_batches, "each action once"
        assert {action.stage % ranks for action in order} == {rank}


def test_1f1b_keeps_as_many_micro_batches_as_ranks_and_gpipe_keeps_all():
    numbers = {"ranks": 4, "micro_batches": 16}
    one_each = [most_in_flight(order) for order in order_of_all("1f1b", **numbers)]
    all_first = [most_in_flight(order) for order in order_of_all("gpipe", **numbers)]
    assert one_each == [4, 3, 2, 1]
    assert all_first == [16, 16, 16, 16]


def plain(actions, rank):
    """The actions of a rank without their times."""
    mine = [action for action in actions if action.rank == rank]
    return [action.at(0.0, 0.0) for action in mine]


def assert_in_order(actions, schedule, ranks, micro_batches):
    """The recorded actions are those of the orders by hand, and none began before its input."""
    for rank, order in enumerate(order_of_all(schedule, ranks=ranks, micro_batches=micro_batches)):
        assert plain(actions, rank) == order
    ends = {(each.stage, each.direction, each.micro_batch): each.end for each in actions}
    last = max(each.stage for each in actions)
    for each in actions:
        assert each.end > each.begin
        needed = (each.stage - 1, FORWARD, each.micro_batch)
        if each.direction == BACKWARD:
            needed = (each.stage + 1, BACKWARD, each.micro_batch)
        if each.direction == BACKWARD and each.stage == last:
            needed = (each.stage, FORWARD, each.micro_batch)
        # All times are those of rank 0's clock. Earlier by a blink is how exactly they agree.
        assert each.begin >= ends.get(needed, 0.0) - 1e-3


# --- training -------------------------------------------------------------------------------------


def test_all_schedules_train_like_one_process(two_ranks):
    """Catches gradients that are divided by micro-batches, and a mean over unequal micro-batches.

    The orders are those of PyTorch's schedules: what is recorded is what ran.
    """
    runs = two_ranks.run(train_in_all_schedules, steps=3)
    for schedule, (run, actions) in runs.items():
        assert largest_difference(run, train_alone(steps=3)) < TOLERANCE, schedule
        micro_batches = 8 if schedule == "1f1b" else 4
        assert_in_order(actions, schedule, 2, micro_batches)


def test_four_ranks_train_like_one_process(four_ranks):
    """Catches what only ranks in the middle do wrong."""
    runs = four_ranks.run(train_on_four_ranks)
    alone = train_alone(steps=2, num_hidden_layers=8)
    for schedule, (run, actions) in runs.items():
        assert largest_difference(run, alone) < TOLERANCE, schedule
        assert_in_order(actions, schedule, 4, 8 if schedule == "1f1b" else 4)


def test_pipelines_side_by_side(four_ranks):
    """Catches messages to ranks of the other pipeline, and a norm of one pipeline's stages."""
    run = four_ranks.run(train_two_pipelines)
    assert largest_difference(run, train_alone(steps=2)) < TOLERANCE


@pytest.mark.gpu
def test_one_rank_on_a_gpu_trains_and_records():
    """NCCL, and times from events."""
    loss, alone, actions = launch(step_on_a_gpu, ranks=1, device="cuda")
    assert loss == pytest.approx(alone, rel=1e-3)
    assert_in_order(actions, "1f1b", 1, 4)


def test_tied_weights_stay_equal_over_accumulated_batches(two_ranks):
    """Catches copies that drift apart, earlier gradients that are added twice, and their norm."""
    run = two_ranks.run(accumulate_with_tied_weights)
    torch.testing.assert_close(
        run.parameters.pop("lm_head.weight"), run.parameters["model.embed_tokens.weight"]
    )
    model = tiny_model(tie_word_embeddings=True)
    optimizer = sgd(model.parameters())
    losses = []
    for first in (0, 2):
        batches = [global_batch(first), global_batch(first + 1)]
        tokens = sum(counted_tokens(batch["labels"]) for batch in batches)
        total = sum(
            loss_sum(model(batch["input_ids"]).logits, batch["labels"]) for batch in batches
        )
        (total / tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item() / tokens)
    alone = Run(losses, {name: value.detach() for name, value in model.named_parameters()})
    assert largest_difference(run, alone) < TOLERANCE


def test_adapters_train_in_stages(two_ranks):
    """Catches names that a wrapper changes, and frozen weights whose gradients are waited for."""
    model = with_adapters()
    batch = global_batch(0)
    loss = loss_sum(model(batch["input_ids"]).logits, batch["labels"])
    loss = loss / counted_tokens(batch["labels"])
    loss.backward()
    trained = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    alone = Run([loss.item()], {name: value.grad for name, value in trained})
    assert largest_difference(two_ranks.run(step_with_adapters), alone) < TOLERANCE


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_stages_in_a_row_are_the_model(family):
    """Catches a family that does something between its blocks, and borders of packed documents."""
    options = {"num_hidden_layers": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    if family == "Mistral":
        options |= {"sliding_window": 5}
    if family == "Qwen3":
        kinds = ["full_attention", "sliding_attention"] * 2
        options |= {"sliding_window": 5, "use_sliding_window": True, "layer_types": kinds}
    model = as_if_trained(small_model(family, **options))
    assert model.config.model_type in FAMILIES
    ids = torch.randint(128, (2, 12))
    counting = torch.arange(12).expand(2, 12)
    for positions in (counting, counting % 7):
        hidden = ids
        with torch.no_grad():
            for number in range(4):
                hidden = Stage(model, number, 4)(hidden, positions)
            expected = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(hidden, expected)


# --- time and bytes -------------------------------------------------------------------------------


def test_the_measured_bubble_is_the_predicted_one(two_ranks):
    """Blocks that sleep take equally long on any machine. What is beside them is less than that.

    GPipe idles as long as 1F1B: its order is compared above.
    """
    bubbles = two_ranks.run(bubbles_of_sleepers, seconds=0.025, micro_batches=4)
    expected = {
        "1f1b": predicted_bubble(ranks=2, micro_batches=4),
        "interleaved": predicted_bubble(ranks=2, micro_batches=4, stages_per_rank=2),
    }
    for schedule, (measured, drawn) in bubbles.items():
        assert drawn == pytest.approx(expected[schedule], abs=0.06), schedule
        assert expected[schedule] - 0.03 < measured < expected[schedule] + 0.15, schedule


@pytest.mark.parametrize(
    ("schedule", "tied"), [("gpipe", False), ("1f1b", True), ("interleaved", False)]
)
def test_bytes_are_the_predicted_ones(two_ranks, schedule, tied):
    """Catches weights of other stages that stay, logits that are kept, and messages not counted."""
    for measured in two_ranks.run(bytes_of_a_step, schedule=schedule, tied=tied):
        # AdamW has a counter for each parameter, and all ranks have the frequencies of RoPE.
        assert measured["held"] == pytest.approx(measured["predicted"], rel=1e-3)
        assert measured["peak"] == pytest.approx(measured["predicted peak"], rel=0.05)
        assert measured["sent"] == measured["predicted sent"]


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "zigzag"}, "schedule='zigzag': choose one of gpipe, 1f1b, interleaved"),
        ({"micro_batches": 1}, "micro_batches=1: give at least as many as there are ranks, 2"),
        ({"micro_batches": 3, "schedule": "interleaved"}, "give a multiple of 2"),
        ({"stages_per_rank": 2}, "1f1b has one stage on each rank"),
        ({"stages_per_rank": 1, "schedule": "interleaved"}, "a whole number of 2 or more"),
        ({"stages_per_rank": 3, "schedule": "interleaved"}, "4 blocks do not divide into 6 stages"),
        ({"make": with_three_blocks}, "3 blocks do not divide into 2 stages"),
        ({"make": with_a_frozen_half}, "nothing trains in the first of 2 stages"),
        ({"make": gemma}, "the family 'gemma2' cannot be cut into stages"),
        ({"twice": True}, "a pipeline has its stages already"),
        ({"rows": 3}, "3 rows: give a multiple of micro_batches=2"),
        ({"wrong_rank": 1}, "micro_batches: rank 0 gives 2, rank 1 gives 4"),
    ],
)
def test_what_cannot_work_is_refused_on_every_rank(two_ranks, options, message):
    """A ValueError here means that all ranks raised it: one alone would be a RankError."""
    with pytest.raises(ValueError, match=message):
        two_ranks.run(call, timeout=30, **options)


def test_bad_batches_are_refused_and_the_pipeline_goes_on(two_ranks):
    texts, loss = two_ranks.run(steps_that_are_refused, timeout=30)
    assert len(texts) == 5
    assert texts[0].startswith("input_ids: rank 0 gives [8, 32], rank 1 gives [4, 32]")
    assert texts[1].startswith("tokens=0: give a whole number of 1 or more")
    assert texts[2].startswith("labels [8, 31] beside input_ids [8, 32]")
    assert texts[3].startswith("tokens=0")
    assert texts[4].startswith("nothing was recorded")
    assert loss == pytest.approx(train_alone(steps=1).losses[0], abs=TOLERANCE)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        (Shape(8, 32, micro_batches=2), {}, "give the shape of the whole step"),
        (Shape(9, 32), {}, "rows that the pipeline can cut evenly"),
        (Shape(8, 32), {"rank": 2}, "rank=2: give a whole number from 0 to 1"),
        (Shape(8, 32), {"ranks": 3}, "4 blocks do not divide into 3 stages"),
        (Shape(8, 32), {"schedule": "later"}, "choose one of gpipe"),
    ],
)
def test_an_estimate_of_what_cannot_work_is_refused(shape, options, message):
    model = tiny_model()
    options = {"ranks": 2, "micro_batches": 4} | options
    with pytest.raises(ValueError, match=message):
        budget = budget_of(model, shape.whole()).change(shape=shape)
        estimate_pipeline_parallel(budget, model, shape, **options)


def test_without_ranks_it_says_how_to_start_them():
    with pytest.raises(ValueError, match="there is no process group"):
        apply_pipeline_parallel(tiny_model(), micro_batches=2)
