import pytest

from recipes_lib.core.ranks import rank
from recipes_lib.parallel.data_parallel import (
    apply_data_parallel,
    data_parallel_step,
    make_replicas,
    threaded_step,
)
from recipes_lib.parallel.data_parallel.lanes import WAITING, LaneRecorder
from tests.parallel.parity import (
    MAX_NORM,
    TOLERANCE,
    Run,
    counted_tokens,
    global_batch,
    largest_difference,
    own_batches,
    sgd,
    tiny_model,
    train_alone,
    train_on_rank,
    whole_parameters,
)

ONE_BUCKET = 1e6  # MiB
NO_CLIPPING = 1e9  # a norm that no gradient has: a factor in all gradients shows


def train(count=1, seed_of_rank=False, max_norm=MAX_NORM, **options):
    model = tiny_model(seed=rank() if seed_of_rank else 0)
    wrapper = apply_data_parallel(model, **options)
    by = {"step": data_parallel_step, "count": count, "max_norm": max_norm}
    return train_on_rank(wrapper, sgd(model.parameters()), 4, **by)


# --- the same training ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        # Several buckets; rank 1 starts elsewhere, and must not stay there.
        {"bucket_megabytes": 0.1, "seed_of_rank": True},
        {"count": 2, "bucket_megabytes": ONE_BUCKET, "max_norm": NO_CLIPPING},
    ],
    ids=str,
)
def test_ranks_of_unequal_tokens_equal_one_process(two_ranks, options):
    """The mistake: a mean of the ranks' means."""
    reference = train_alone(max_norm=options.get("max_norm", MAX_NORM))
    assert largest_difference(two_ranks.run(train, **options), reference) < TOLERANCE


# --- two lanes ------------------------------------------------------------------------------------


def record(bucket_megabytes, count=1):
    wrapper = apply_data_parallel(tiny_model(), bucket_megabytes=bucket_megabytes)
    recorder = LaneRecorder(wrapper)
    optimizer = sgd(wrapper.parameters())

    def step():
        return data_parallel_step(wrapper, optimizer, own_batches(0, count))

    step()
    return recorder.record(step)


def test_the_two_lanes_of_a_step(two_ranks):
    """The mistakes: a send that is seen where there is none, a block whose time another one gets,
    and, with the forward outside of `no_sync`, micro-batches that all send all gradients.
    """
    bucketed = two_ranks.run(record, bucket_megabytes=0.1)
    at_once = two_ranks.run(record, bucket_megabytes=ONE_BUCKET, count=4)
    assert len(bucketed.communication) > 4
    assert len(at_once.communication) == 1
    assert at_once.hidden_share == 0 < bucketed.hidden_share
    forward = [f"forward block {number}" for number in range(4)]
    backward = [f"backward block {number}" for number in (3, 2, 1, 0)]
    head = "output layer and loss, forward and backward"
    names = [part.name for part in bucketed.compute]
    assert names == ["forward embedding", *forward, head, *backward, WAITING]
    for part, following in zip(bucketed.compute, bucketed.compute[1:]):
        assert part.start <= part.end == following.start


# --- threads of one process -----------------------------------------------------------------------


def test_threads_equal_one_process():
    """The mistake: a thread dies, and the step is made with the gradients of the others."""
    replicas = make_replicas(tiny_model(), 2)
    optimizer = sgd(replicas[0].parameters())
    losses = []
    for step in range(2):
        batch = global_batch(step)
        chunks = {name: tensor.chunk(2) for name, tensor in batch.items()}
        halves = [{name: two[i] for name, two in chunks.items()} for i in range(2)]
        tokens = counted_tokens(batch["labels"])
        losses.append(threaded_step(replicas, optimizer, halves, tokens))
    got = Run(losses, whole_parameters(replicas[0]))
    expected = train_alone(steps=2, max_norm=NO_CLIPPING)
    assert largest_difference(got, expected) < TOLERANCE
    broken = [halves[0], {**halves[1], "input_ids": halves[1]["input_ids"] + 10**6}]
    with pytest.raises(IndexError):
        threaded_step(replicas, optimizer, broken, tokens)
    assert largest_difference(whole_parameters(replicas[0]), got.parameters) == 0
