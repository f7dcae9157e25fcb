import pytest
import torch

from recipes_lib.core.predict.flops import step_operations
from recipes_lib.training.curriculum import (
    curriculum_batches,
    curriculum_schedule,
    rows_that_grow,
    steps_at_equal_compute,
)

STAGES = [(16, 0.4), (32, 0.3), (64, 0.3)]
SIZES = {"stages": STAGES, "tokens_per_step": 128, "steps": 10}
STREAM = torch.arange(20 * 64 + 37)  # ten steps are one epoch


def ids_of(tokens=STREAM, **options):
    return [batch["input_ids"] for batch in curriculum_batches(tokens, **SIZES | options)]


def test_rows_grow_and_tokens_per_step_stay():
    """The mistake: a constant number of rows trains early steps on few tokens."""
    batches = list(curriculum_batches(STREAM, **SIZES))
    shapes = [tuple(batch["input_ids"].shape) for batch in batches]
    assert shapes == [(8, 16)] * 4 + [(4, 32)] * 3 + [(2, 64)] * 3
    for batch in batches:
        assert torch.equal(batch["labels"], batch["input_ids"])  # the model shifts them
        # Masking the one leaves the other.
        assert batch["labels"].data_ptr() != batch["input_ids"].data_ptr()


def test_rows_are_those_of_the_loop_by_hand():
    """The mistake: a step that holds other tokens than under another schedule."""
    in_order = torch.cat(ids_of(stages=[(64, 1.0)])).flatten()
    by_hand = rows_that_grow(in_order, **SIZES)
    for got, expected in zip(ids_of(), by_hand, strict=True):
        assert torch.equal(got, expected)


def test_every_token_once_per_epoch():
    """The mistake: tokens that are left over are the same ones in every epoch, and never learnt."""
    read = torch.cat([ids.flatten() for ids in ids_of(steps=40)])
    epochs = read.view(4, 20 * 64)  # ten steps each
    for epoch in epochs:
        assert len(epoch.unique()) == 20 * 64
        assert (epoch.view(-1, 64).diff() == 1).all()  # whole pieces of text
        assert (epoch.sort().values.diff() == 1).all()
    assert len({epoch.min().item() for epoch in epochs}) > 1
    first, second = (epoch - epoch.min() for epoch in epochs[:2])
    assert not torch.equal(first, second)  # another order


def test_an_epoch_may_end_inside_a_step():
    """The mistake: five pieces, two per step, and each new epoch drops the fifth."""
    stream = torch.arange(5 * 64)
    read = torch.cat([ids.flatten() for ids in ids_of(stream)])
    starts = read.view(-1, 64)[:, 0]  # of all pieces
    for epoch in starts.view(4, 5):
        assert torch.equal(epoch.sort().values, stream[::64])


def test_resumed_at_any_step_and_repeated_by_seed():
    """The mistake: an order that depends on the steps before."""
    whole = ids_of(steps=25)
    for start in (0, 9, 10, 25):
        rest = ids_of(steps=25, start_step=start)
        assert len(rest) == 25 - start
        assert all(map(torch.equal, rest, whole[start:]))
    assert not torch.equal(ids_of(seed=1)[0], whole[0])


def test_shares_become_steps():
    """The mistake: rounding each count by itself loses a step, or invents one."""

    def counts(steps, stages=STAGES):
        schedule = curriculum_schedule(stages=stages, tokens_per_step=64, steps=steps)
        return [count for _, count in schedule]

    assert counts(10) == [4, 3, 3]
    assert counts(100) == [40, 30, 30]
    thirds = [(16, 1 / 3), (32, 1 / 3), (64, 1 / 3)]  # they sum to 1 but for rounding
    assert counts(7, thirds) == [2, 3, 2]
    assert all(sum(counts(steps)) == steps for steps in range(4, 60))


def test_steps_at_equal_compute_cost_the_same(llama):
    """The mistake: a schedule that never sees the full length gets too few steps."""

    def cost(length):
        return step_operations(llama, rows=1, length=length) / length

    for stages in ([(32, 0.5), (256, 0.5)], [(32, 1.0)]):
        steps = steps_at_equal_compute(llama, stages, 200, full_length=256)
        spent = sum(steps * share * cost(length) for length, share in stages)
        assert spent == pytest.approx(200 * cost(256), rel=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": [(24, 0.5), (64, 0.5)]}, "divide the longest"),
        ({"tokens_per_step": 96}, "multiple of 64"),
        ({"steps": 2}, "raise it, or drop a stage"),
    ],
)
def test_what_does_not_fit_is_refused_at_once(options, message):
    """The mistake: found hours later, at the first step of the next stage."""
    with pytest.raises(ValueError, match=message):
        curriculum_batches(**{"tokens": STREAM} | SIZES | options)
