import pytest
import torch

from recipes_lib.core.predict.budget import Shape
from recipes_lib.core.predict.plain_step import budget_of
from recipes_lib.core.ranks import rank
from recipes_lib.core.ranks.meshes import default_mesh, mesh_of
from recipes_lib.memory.optimizer_in_backward import apply_optimizer_in_backward
from recipes_lib.parallel.data_parallel import (
    apply_data_parallel,
    averaged_by_hand,
    data_parallel_step,
    estimate_data_parallel,
    predicted_sent_bytes,
)
from recipes_lib.parallel.data_parallel.lanes import WAITING, LaneRecorder
from recipes_lib.parallel.data_parallel.threads import make_replicas, threaded_step
from tests.parallel.parity import (
    MAX_NORM,
    TOLERANCE,
    Run,
    counted_tokens,
    global_batch,
    largest_difference,
    loss_sum,
    own_batches,
    sgd,
    tiny_model,
    train_alone,
    whole_parameters,
)

ONE_BUCKET = 1e6  # MiB
NO_CLIPPING = 1e9  # a norm that no gradient has: a factor in all gradients shows


def train(steps=4, count=1, seed_of_rank=False, max_norm=MAX_NORM, **options):
    model = tiny_model(seed=rank() if seed_of_rank else 0)
    wrapper = apply_data_parallel(model, **options)
    optimizer = sgd(model.parameters())
    losses = []
    for step in range(steps):
        batches = own_batches(step, count)
        losses.append(data_parallel_step(wrapper, optimizer, batches, max_norm=max_norm))
    return Run(losses, whole_parameters(wrapper))


# --- the same training ----------------------------------------------------------------------------


def train_by_hand(steps=4):
    model = tiny_model()
    optimizer = sgd(model.parameters())
    world = torch.distributed.get_world_size()
    for step in range(steps):
        (batch,) = own_batches(step)
        tokens = counted_tokens(global_batch(step)["labels"])
        logits = model(input_ids=batch["input_ids"]).logits
        (loss_sum(logits, batch["labels"]) * world / tokens).backward()
        averaged_by_hand(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return whole_parameters(model)


def test_by_hand_equals_one_process(two_ranks):
    got = two_ranks.run(train_by_hand)
    assert largest_difference(got, train_alone().parameters) < TOLERANCE


@pytest.mark.parametrize(
    "options",
    [
        {"bucket_megabytes": 0.1},  # several buckets
        {"count": 2, "bucket_megabytes": ONE_BUCKET, "max_norm": NO_CLIPPING},
        {"seed_of_rank": True},  # rank 1 starts elsewhere, and must not stay there
    ],
    ids=str,
)
def test_ranks_of_unequal_tokens_equal_one_process(two_ranks, options):
    reference = train_alone(max_norm=options.get("max_norm", MAX_NORM))
    assert largest_difference(two_ranks.run(train, **options), reference) < TOLERANCE


def test_four_ranks_equal_one_process(four_ranks):
    assert largest_difference(four_ranks.run(train, count=2), train_alone()) < TOLERANCE


# --- two lanes ------------------------------------------------------------------------------------


def record(bucket_megabytes, count=1):
    wrapper = apply_data_parallel(tiny_model(), bucket_megabytes=bucket_megabytes)
    recorder = LaneRecorder(wrapper)
    optimizer = sgd(wrapper.parameters())

    def step():
        return data_parallel_step(wrapper, optimizer, own_batches(0, count))

    step()
    return recorder.record(step)


def test_buckets_are_sent_during_backward_and_one_bucket_after_it(two_ranks):
    gradient_bytes = sum(4 * p.numel() for p in tiny_model().parameters())
    bucketed = two_ranks.run(record, bucket_megabytes=0.1)
    assert len(bucketed.communication) > 4
    first = min(part.start for part in bucketed.communication)
    assert first < bucketed.last_gradient
    at_once = two_ranks.run(record, bucket_megabytes=ONE_BUCKET)
    (bucket,) = at_once.communication
    assert bucket.start >= at_once.last_gradient
    assert at_once.hidden_share == 0
    for lanes in (bucketed, at_once):
        assert sum(part.size for part in lanes.communication) == gradient_bytes


def test_the_compute_lane_has_every_block_in_order_and_no_gap(two_ranks):
    lanes = two_ranks.run(record, bucket_megabytes=0.1, count=2)
    names = [part.name for part in lanes.compute]
    forward = [f"forward block {number}" for number in range(4)]
    backward = [f"backward block {number}" for number in (3, 2, 1, 0)]
    one = ["forward embedding", *forward, "output layer and loss, forward and backward", *backward]
    assert names == [*one, WAITING, *one, WAITING]
    for part, following in zip(lanes.compute, lanes.compute[1:]):
        assert part.start <= part.end == following.start


def test_micro_batches_are_sent_once(two_ranks):
    """Were the forward outside of `no_sync`, every micro-batch would send all gradients."""
    lanes = two_ranks.run(record, bucket_megabytes=ONE_BUCKET, count=4)
    assert len(lanes.communication) == 1


# --- threads of one process -----------------------------------------------------------------------


def test_threads_equal_one_process():
    replicas = make_replicas(tiny_model(), 2)
    optimizer = sgd(replicas[0].parameters())
    losses = []
    for step in range(2):
        batch = global_batch(step)
        halves = [{name: half[i] for name, half in _halves(batch).items()} for i in range(2)]
        tokens = counted_tokens(batch["labels"])
        losses.append(threaded_step(replicas, optimizer, halves, tokens))
    got = Run(losses, whole_parameters(replicas[0]))
    expected = train_alone(steps=2, max_norm=NO_CLIPPING)
    assert largest_difference(got, expected) < TOLERANCE
    with pytest.raises(ValueError, match="1 batches for 2 replicas"):
        threaded_step(replicas, optimizer, halves[:1], tokens)
    # The mistake: a thread dies, and the step is made with the gradients of the others.
    broken = [halves[0], {**halves[1], "input_ids": halves[1]["input_ids"] + 10**6}]
    before = whole_parameters(replicas[0])
    with pytest.raises(IndexError):
        threaded_step(replicas, optimizer, broken, tokens)
    assert largest_difference(whole_parameters(replicas[0]), before) == 0


def _halves(batch):
    return {name: tensor.chunk(2) for name, tensor in batch.items()}


# --- what is refused ------------------------------------------------------------------------------


def refusals():
    """The message of each mistake, on this rank. A rank that raised alone would hang the other."""
    messages = {}

    def expect(name, function, *args, **options):
        with pytest.raises(ValueError) as caught:
            function(*args, **options)
        messages[name] = str(caught.value)

    layers = 2 + rank()
    expect("another model", apply_data_parallel, tiny_model(num_hidden_layers=layers))
    expect("another option", apply_data_parallel, tiny_model(), bucket_megabytes=1 + rank())
    expect("no buckets", apply_data_parallel, tiny_model(), bucket_megabytes=0)
    expect("no model", apply_data_parallel, torch.nn.Linear(2, 2))
    expect("frozen", apply_data_parallel, tiny_model().requires_grad_(False))
    expect("two dimensions", apply_data_parallel, tiny_model(), mesh=mesh_of(a=2, b=1))

    stepping = tiny_model()
    apply_optimizer_in_backward(stepping, lr=1e-3)
    expect("steps in backward", apply_data_parallel, stepping)

    model = tiny_model()
    model.lm_head.requires_grad_(False)
    wrapper = apply_data_parallel(model, mesh=default_mesh())
    expect("twice", apply_data_parallel, wrapper)
    optimizer = sgd(model.parameters())
    expect("not the wrapper", data_parallel_step, model, optimizer, own_batches(0))
    model.lm_head.requires_grad_(True)
    expect("trains since", data_parallel_step, wrapper, optimizer, own_batches(0))
    model.lm_head.requires_grad_(False)
    recorder = LaneRecorder(wrapper)
    expect("second recorder", LaneRecorder, wrapper)
    expect("recorder without buckets", LaneRecorder, model)
    recorder.record(lambda: data_parallel_step(wrapper, optimizer, own_batches(0)))
    return messages


def test_refused_on_every_rank_and_without_a_hang(two_ranks):
    messages = two_ranks.run(refusals, timeout=60)
    assert "give the same on all ranks" in messages["another model"]
    assert "give the same on all ranks" in messages["another option"]
    assert "bucket_megabytes=0" in messages["no buckets"]
    assert "no Hugging Face model" in messages["no model"]
    assert "no parameter trains" in messages["frozen"]
    assert "2 dimensions" in messages["two dimensions"]
    assert "before they are averaged" in messages["steps in backward"]
    assert "no Hugging Face model" in messages["twice"]
    assert "does not average" in messages["not the wrapper"]
    assert "lm_head.weight" in messages["trains since"]
    assert "already" in messages["second recorder"]
    assert "has no buckets" in messages["recorder without buckets"]


def test_without_ranks_it_says_how_to_get_them():
    with pytest.raises(ValueError, match="no process group"):
        apply_data_parallel(tiny_model())


# --- the arithmetic -------------------------------------------------------------------------------


def test_gradients_are_there_all_the_time_in_the_estimate():
    model = tiny_model()
    shape = Shape(batch=8, seq=32, ranks=2)
    alone = budget_of(model, Shape(batch=4, seq=32))
    budget = estimate_data_parallel(budget_of(model, shape), model, shape)
    assert budget.activations == alone.activations  # of the rows of one rank
    assert budget.carried == budget.gradients == alone.gradients
    assert (budget.weights, budget.states) == (alone.weights, alone.states)


def test_sent_bytes():
    assert predicted_sent_bytes(gradient_bytes=100, ranks=1) == 0
    assert predicted_sent_bytes(gradient_bytes=100, ranks=2) == 100
    assert predicted_sent_bytes(gradient_bytes=100, ranks=4) == 150
