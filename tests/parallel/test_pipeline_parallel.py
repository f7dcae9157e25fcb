"""Pipelines on two and four ranks: the same training, in the predicted order and bytes."""

import pytest
import torch
from torch import distributed

from recipes_lib.core.ranks.meshes import mesh_of
from recipes_lib.parallel.pipeline_parallel import (
    apply_pipeline_parallel,
    order_of_rank,
    predicted_bubble,
    warm_up_of_rank,
)
from recipes_lib.parallel.pipeline_parallel.stage import Stage
from recipes_lib.parallel.pipeline_parallel.timed_actions import (
    BACKWARD,
    FORWARD,
    Action,
    bubble_of,
)
from tests.core.refusal import refusal
from tests.parallel.parity import (
    MAX_NORM,
    TOLERANCE,
    Run,
    global_batch,
    largest_difference,
    of_all_ranks,
    sgd,
    tiny_model,
    train_alone,
)
from tests.small_models import as_if_trained, small_model

# --- the orders -----------------------------------------------------------------------------------


def order_of_all(schedule, *, ranks, **numbers):
    """The order of each rank."""
    numbers["ranks"] = ranks
    warm_ups = [warm_up_of_rank(schedule, rank, **numbers) for rank in range(ranks)]
    return [order_of_rank(rank, warm_up=warm_ups[rank], **numbers) for rank in range(ranks)]


def test_the_bubble_of_a_grid():
    """The mistake: idle time of one rank, or of busy ones. Here a backward takes as long as two."""
    first = [(FORWARD, 0, 1), (FORWARD, 1, 2), (BACKWARD, 4, 6), (BACKWARD, 7, 9)]
    last = [(FORWARD, 1, 2), (BACKWARD, 2, 4), (FORWARD, 4, 5), (BACKWARD, 5, 7)]
    grid = []
    for rank, row in enumerate((first, last)):
        grid += [Action(rank, rank, kind, 0, begin, end) for kind, begin, end in row]
    assert bubble_of(grid) == pytest.approx(predicted_bubble(ranks=2, micro_batches=2))


def needed(action, last):
    """The action that has to end before this one can begin; None for the very first forward."""
    _, stage, direction, micro_batch, *_ = action
    if direction == FORWARD:
        return None if stage == 0 else (stage - 1, FORWARD, micro_batch)
    if stage == last:
        return stage, FORWARD, micro_batch
    return stage + 1, BACKWARD, micro_batch


# --- training -------------------------------------------------------------------------------------


def parameters_of_all(pipeline):
    parts = of_all_ranks({name: value.detach() for name, value in pipeline.named_parameters()})
    return {name: value for part in parts for name, value in part.items()}


def train(schedule, micro_batches, steps, sizes, side_by_side=False):
    """The steps of `train_alone` in a pipeline. Returns a Run, and the order of the last step.

    `side_by_side`: there are two pipelines of two ranks, each on the whole batch.
    """
    mesh = mesh_of(replicate=2, pipeline=2)["pipeline"] if side_by_side else None
    pipeline = apply_pipeline_parallel(
        tiny_model(**sizes), mesh=mesh, schedule=schedule, micro_batches=micro_batches
    )
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
        (4, [("1f1b", 8), ("interleaved", 4)], {"num_hidden_layers": 8}),
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


def test_tied_weights_of_pipelines_side_by_side(four_ranks):
    """The mistakes: copies that drift apart, or whose gradient the norm has twice; messages to
    ranks of the other pipeline.
    """
    tied = {"tie_word_embeddings": True}
    options = {"schedule": "1f1b", "micro_batches": 4, "steps": 2, "side_by_side": True}
    run, _ = four_ranks.run(train, sizes=tied, **options)
    head = run.parameters.pop("lm_head.weight")
    torch.testing.assert_close(head, run.parameters["model.embed_tokens.weight"])
    assert largest_difference(run, train_alone(steps=2, **tied)) < TOLERANCE


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


# --- what is refused ------------------------------------------------------------------------------


def refusals():
    """What is said about each mistake, on this rank."""
    two = {"micro_batches": 2}
    cut = tiny_model()
    pipeline = apply_pipeline_parallel(cut, **two)
    tied = apply_pipeline_parallel(tiny_model(tie_word_embeddings=True), **two)
    tied.step(**global_batch(0))
    three = global_batch(0, rows=3)
    batch = global_batch(0)
    unlabelled = batch | {"labels": torch.full_like(batch["labels"], -100)}
    of_rank = 2 + 2 * distributed.get_rank()
    interleaved = {"schedule": "interleaved"}
    return {
        "stages": refusal(
            apply_pipeline_parallel, tiny_model(), stages_per_rank=3, **two, **interleaved
        ),
        "family": refusal(apply_pipeline_parallel, small_model("Gemma2"), **two),
        "twice": refusal(apply_pipeline_parallel, cut, **two),
        "rows": refusal(pipeline.step, **three),
        "labels": refusal(pipeline.step, **unlabelled),
        "earlier": refusal(tied.step, **global_batch(1)),
        "ranks differ": refusal(apply_pipeline_parallel, tiny_model(), micro_batches=of_rank),
    }


def test_what_cannot_work_is_refused_on_every_rank(two_ranks):
    """The mistake: one rank raises, and the other waits for ever."""
    found = two_ranks.run(refusals, timeout=60)
    assert "4 blocks do not divide into 6 stages" in found["stages"]
    assert "the family 'gemma2' cannot be cut into stages" in found["family"]
    assert "a pipeline has its stages already" in found["twice"]
    assert "3 rows: give a multiple of micro_batches=2" in found["rows"]
    assert "tokens=0: give a whole number of 1 or more" in found["labels"]
    assert "gradients of an earlier batch" in found["earlier"]
    assert "micro_batches: rank 0 gives 2, rank 1 gives 4" in found["ranks differ"]
