import pytest
import torch
from torch import distributed

from recipes_lib.core.predict.budget import Shape
from recipes_lib.core.predict.dry_ranks import rank_peak
from recipes_lib.core.predict.plain_step import budget_of
from recipes_lib.core.ranks import rank, world_size
from recipes_lib.core.ranks.meshes import mesh_of
from recipes_lib.core.ranks.rank_bytes import rank_bytes
from recipes_lib.core.ranks.rank_step import rank_step, sum_of_losses
from recipes_lib.core.ranks.shard_groups import shard_in_groups
from recipes_lib.core.ranks.traffic import count_traffic
from recipes_lib.memory.optimizer_in_backward import apply_optimizer_in_backward
from recipes_lib.parallel.zero import (
    apply_zero,
    estimate_zero,
    owners_of,
    predicted_rank_bytes,
    predicted_sent_bytes,
    step_of_own_part,
    zero_step,
)
from recipes_lib.training.gradient_accumulation import estimate_gradient_accumulation
from tests.parallel.parity import (
    MAX_NORM,
    TOLERANCE,
    Run,
    adamw,
    counted_tokens,
    global_batch,
    largest_difference,
    loss_sum,
    own_batches,
    tiny_model,
    train_alone,
    whole_parameters,
)

ADAMW = {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.01}
SGD = {"lr": 0.1, "momentum": 0.9}
NO_CLIPPING = 1e9  # a norm that no gradient has: a factor in all gradients shows
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


def train(stage, steps=4, count=1, reduce_each=False, seed_of_rank=False, max_norm=MAX_NORM):
    model = tiny_model(seed=rank() if seed_of_rank else 0)
    model, optimizer = apply_zero(model, torch.optim.AdamW, stage=stage, **ADAMW)
    losses = []
    for step in range(steps):
        batches = own_batches(step, count)
        loss = zero_step(model, optimizer, batches, max_norm=max_norm, reduce_each=reduce_each)
        losses.append(loss)
    return Run(losses, whole_parameters(model))


# --- the same training ----------------------------------------------------------------------------


def train_by_hand(steps=4):
    model = tiny_model()
    parameters = list(model.parameters())
    owners = owners_of([parameter.numel() for parameter in parameters], ranks=world_size())
    own = [parameter for parameter, owner in zip(parameters, owners) if owner == rank()]
    optimizer = adamw(own)
    for step in range(steps):
        (batch,) = own_batches(step)
        tokens = counted_tokens(global_batch(step)["labels"])
        logits = model(input_ids=batch["input_ids"]).logits
        (loss_sum(logits, batch["labels"]) * world_size() / tokens).backward()
        step_of_own_part(parameters, owners, optimizer)
        model.zero_grad()
    return whole_parameters(model)


def test_by_hand_equals_one_process(two_ranks):
    expected = train_alone(optimizer=adamw, max_norm=NO_CLIPPING).parameters
    assert largest_difference(two_ranks.run(train_by_hand), expected) < TOLERANCE


@STAGES
@pytest.mark.parametrize(
    "options",
    [
        {"count": 2, "max_norm": NO_CLIPPING},
        {"count": 2, "reduce_each": True, "seed_of_rank": True},
    ],
    ids=str,
)
def test_ranks_of_unequal_tokens_equal_one_process(two_ranks, stage, options):
    """With `seed_of_rank` rank 1 starts elsewhere: parts of two models must not be joined."""
    run = two_ranks.run(train, stage=stage, **options)
    reference = train_alone(optimizer=adamw, max_norm=options.get("max_norm", MAX_NORM))
    assert largest_difference(run, reference) < TOLERANCE


def train_all_stages():
    return [train(stage, steps=2) for stage in (1, 2, 3)]


def test_four_ranks_equal_one_process(four_ranks):
    for run in four_ranks.run(train_all_stages):
        assert largest_difference(run, train_alone(steps=2, optimizer=adamw)) < TOLERANCE


# --- what each rank holds -------------------------------------------------------------------------


def held(stage, optimizer_class=torch.optim.AdamW, options=ADAMW, count=1, reduce_each=False):
    """Bytes on all ranks between the last backward and the step; and whole between the steps."""
    model, optimizer = apply_zero(tiny_model(), optimizer_class, stage=stage, **options)
    zero_step(model, optimizer, own_batches(0, count), reduce_each=reduce_each)
    between = []

    def before_step(*_):
        of_rank = rank_bytes(model, optimizer)
        between.append((of_rank.parameters, of_rank.gradients, of_rank.states))

    with_hook = optimizer.register_step_pre_hook(before_step)
    zero_step(model, optimizer, own_batches(1, count), reduce_each=reduce_each)
    with_hook.remove()
    of_ranks = [None] * world_size()
    distributed.all_gather_object(of_ranks, between[0])
    return of_ranks


@pytest.mark.parametrize(
    ("stage", "optimizer_class", "options", "states"),
    [
        (1, torch.optim.AdamW, ADAMW, 2),
        (2, torch.optim.SGD, SGD, 1),
        (3, torch.optim.AdamW, ADAMW, 2),
    ],
)
def test_bytes_of_each_rank_as_predicted(two_ranks, stage, optimizer_class, options, states):
    of_ranks = two_ranks.run(held, stage=stage, optimizer_class=optimizer_class, options=options)
    for number, (weights, gradients, kept) in enumerate(of_ranks):
        expected = predicted_rank_bytes(
            tiny_model(), stage=stage, ranks=2, rank=number, states_per_weight=states
        )
        assert weights == expected["weights"]
        assert gradients == expected["gradients"]
        # AdamW counts the steps of each parameter, 4 bytes each.
        assert kept == pytest.approx(expected["states"], rel=0.001)


def held_in_all_stages():
    return {stage: held(stage) for stage in (1, 2, 3)}


def test_bytes_on_four_ranks_fall_as_predicted(four_ranks):
    for stage, of_ranks in four_ranks.run(held_in_all_stages).items():
        for number, measured in enumerate(of_ranks):
            expected = predicted_rank_bytes(tiny_model(), stage=stage, ranks=4, rank=number)
            assert measured == pytest.approx(tuple(expected.values()), rel=0.001)


def gradients_between_micro_batches(reduce_each):
    """Bytes of gradients on this rank after the first of two micro-batches, whole or in parts."""
    model, optimizer = apply_zero(tiny_model(), torch.optim.AdamW, stage=3, **ADAMW)
    seen = []

    def look_and_sum(model, batch):
        of_rank = rank_bytes(model)
        seen.append((of_rank.gathered, of_rank.gradients))
        return sum_of_losses(model, batch)

    batches = own_batches(0, 2)
    zero_step(model, optimizer, batches, reduce_each=reduce_each, loss_sum=look_and_sum)
    return seen[1]


def test_accumulation_holds_whole_gradients_unless_each_is_reduced(two_ranks):
    whole = predicted_rank_bytes(tiny_model(), stage=0, ranks=2)["gradients"]
    at_the_end = two_ranks.run(gradients_between_micro_batches, reduce_each=False)
    in_each = two_ranks.run(gradients_between_micro_batches, reduce_each=True)
    assert at_the_end[0] >= whole
    assert in_each == (0, whole / 2)


# --- what is refused ------------------------------------------------------------------------------


def refusals():
    """The message of each mistake, on this rank. A rank that raised alone would hang the other."""
    messages = {}

    def expect(name, model, *args, **options):
        options = {"stage": 3, "lr": 1e-3} | options
        with pytest.raises(ValueError) as caught:
            apply_zero(model, *(args or [torch.optim.AdamW]), **options)
        messages[name] = str(caught.value)

    expect("another stage", tiny_model(), stage=1 + rank())
    expect("another option", tiny_model(), lr=1e-3 + rank())
    expect("another model", tiny_model(num_hidden_layers=2 + rank()))
    expect("stage 4", tiny_model(), stage=4)
    expect("no model", torch.nn.Linear(2, 2))
    expect("frozen", tiny_model().requires_grad_(False))
    expect("two dimensions", tiny_model(), mesh=mesh_of(a=2, b=1))
    with torch.device("meta"):
        expect("meta", tiny_model())
    model = tiny_model()
    expect("an optimizer", model, torch.optim.AdamW(model.parameters()))
    apply_optimizer_in_backward(model, lr=1e-3)
    expect("steps in backward", model)
    model, optimizer = apply_zero(tiny_model(), torch.optim.AdamW, stage=2, lr=1e-3)
    expect("twice", model)
    with pytest.raises(ValueError) as caught:
        zero_step(tiny_model(), optimizer, own_batches(0))
    messages["plain"] = str(caught.value)
    with pytest.raises(ValueError) as caught:
        rank_step(model, optimizer, own_batches(0) * (1 + rank()))
    messages["unequal micro-batches"] = str(caught.value)
    return messages


def test_refused_on_every_rank_and_without_a_hang(two_ranks):
    messages = two_ranks.run(refusals, timeout=60)
    for name in ("another stage", "another option", "another model"):
        assert "give the same on all ranks" in messages[name]
    assert "stage=4: choose one of 1, 2, 3" in messages["stage 4"]
    assert "no Hugging Face model" in messages["no model"]
    assert "no parameter trains" in messages["frozen"]
    assert "2 dimensions" in messages["two dimensions"]
    assert "meta" in messages["meta"]
    assert "before they were split" in messages["an optimizer"]
    assert "takes gradients in backward" in messages["steps in backward"]
    assert "spread over ranks already" in messages["twice"]
    assert "averages no gradients" in messages["plain"]
    assert "[1, 2] micro-batches" in messages["unequal micro-batches"]


def test_without_ranks_it_says_how_to_get_them():
    with pytest.raises(ValueError, match="no process group"):
        apply_zero(tiny_model(), torch.optim.AdamW, stage=1, lr=1e-3)


# --- the arithmetic -------------------------------------------------------------------------------


def test_the_table_of_the_paper():
    """Even parts: 16 bytes per parameter, of which each stage splits one more kind."""
    model = tiny_model()
    whole = sum(4 * parameter.numel() for parameter in model.parameters())
    totals = []
    for stage in (0, 1, 2, 3):
        parts = predicted_rank_bytes(model, stage=stage, ranks=2)
        totals.append(sum(parts.values()) / whole)
    assert totals == pytest.approx([4, 3, 2, 2], rel=0.01)


def test_a_large_embedding_stays_on_one_rank_in_stage_1():
    """PyTorch cuts no parameter: with 8 ranks the fullest has far more than an eighth."""
    model = tiny_model(vocab_size=4096)
    of_ranks = []
    for number in range(8):
        parts = predicted_rank_bytes(model, stage=1, ranks=8, rank=number)
        of_ranks.append(parts["states"])
    whole = predicted_rank_bytes(model, stage=0, ranks=8)["states"]
    assert sum(of_ranks) == whole
    assert max(of_ranks) > 0.35 * whole


def test_uneven_rows_are_counted():
    """Three rows on two ranks are two and one."""
    model = tiny_model(vocab_size=255)
    of_ranks = [predicted_rank_bytes(model, stage=3, ranks=2, rank=number) for number in (0, 1)]
    whole = predicted_rank_bytes(model, stage=0, ranks=2)
    assert of_ranks[0]["weights"] > of_ranks[1]["weights"]
    assert of_ranks[0]["weights"] + of_ranks[1]["weights"] == whole["weights"]


def sent(stage, count):
    """Bytes that this rank sends in a step of `count` micro-batches, by kind, and the calls."""
    model, optimizer = apply_zero(tiny_model(), torch.optim.AdamW, stage=stage, **ADAMW)
    zero_step(model, optimizer, own_batches(0, count))
    with count_traffic() as traffic:
        zero_step(model, optimizer, own_batches(1, count))
    return traffic.sent, traffic.calls


@STAGES
def test_sent_bytes_as_predicted(two_ranks, stage):
    """Beside the model a step sends a few numbers: tokens, the loss, RoPE's frequencies."""
    measured, calls = two_ranks.run(sent, stage=stage, count=1)
    assert measured == pytest.approx(
        predicted_sent_bytes(tiny_model(), stage=stage, ranks=2), abs=256
    )
    if stage == 3:
        assert calls["reduce_scatter"] == 4 + 3  # blocks; embedding, output layer, last norm
        assert calls["all_gather"] == 4 + 7 + 1  # blocks twice, and the counts of tokens


def test_sent_bytes_of_more_ranks():
    model = tiny_model()
    whole = sum(4 * parameter.numel() for parameter in model.parameters())
    sent = [predicted_sent_bytes(model, stage=stage, ranks=4) for stage in (0, 1, 2)]
    assert sent == pytest.approx([1.5 * whole, 2.25 * whole, 1.5 * whole])
    assert predicted_sent_bytes(model, stage=3, ranks=1) == 0
    assert 1.5 * whole < predicted_sent_bytes(model, stage=3, ranks=4) < 2.25 * whole


def peak_of(stage, ranks, shape, make):
    """Bytes of rank 0 at its worst moment, in a dry run with ranks that do not exist."""

    def build(mesh):
        model = make()
        shard_in_groups(model, mesh=mesh, reshard_after_forward=stage == 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        ids = torch.zeros(shape.rows, shape.seq, dtype=torch.long)

        def step():
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    return rank_peak(build, ranks=ranks).total


def wider_model():
    return tiny_model(hidden_size=256, intermediate_size=512, num_hidden_layers=5)


@pytest.mark.parametrize(("stage", "ranks"), [(2, 2), (2, 8), (3, 2)])
def test_peaks_as_estimated(stage, ranks):
    """Few tokens, so that weights and gradients decide, and not the loss.

    The mistakes: blocks that backward has left count as whole; gradients that are still to come
    count as there.
    """
    shape = Shape(batch=ranks, seq=16, ranks=ranks)
    model = wider_model()
    plan = estimate_zero(budget_of(model, shape), model, shape, stage=stage)
    assert plan.peak == pytest.approx(peak_of(stage, ranks, shape, wider_model), rel=0.03)


def test_estimates_of_micro_batches_and_of_stage_1():
    model = tiny_model()
    shape = Shape(batch=8, seq=32, ranks=2, micro_batches=2)
    budget = estimate_gradient_accumulation(budget_of(model, shape), model, shape)
    whole = predicted_rank_bytes(model, stage=0, ranks=2)
    at_the_end = estimate_zero(budget, model, shape, stage=3)
    in_each = estimate_zero(budget, model, shape, stage=3, reduce_each=True)
    assert at_the_end.carried == whole["gradients"]
    assert in_each.carried == whole["gradients"] / 2
    first = estimate_zero(budget, model, shape, stage=1)
    assert first.states == predicted_rank_bytes(model, stage=1, ranks=2)["states"]
    assert (first.weights, first.carried) == (budget.weights, whole["gradients"])
    with pytest.raises(ValueError, match="stage=0"):
        estimate_zero(budget, model, shape, stage=0)
