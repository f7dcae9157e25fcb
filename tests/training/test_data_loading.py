import itertools
import random
import time

import pytest
import torch
from datasets import Dataset

from recipes_lib.core.data.row_order import rows_of_step
from recipes_lib.training.data_loading import (
    measure_stalls,
    predicted_stall_share,
    prefetched_by_hand,
    step_loader,
)

ROWS = [{"number": number} for number in range(40)]
MAKE_SECONDS = 0.06  # a batch that waits for a disk
STEP_SECONDS = 0.04


def collate(rows):
    """A row is its number, so a batch tells which rows it holds."""
    numbers = torch.tensor([row["number"] for row in rows])
    return {"input_ids": numbers, "labels": numbers}


def collate_with_noise(rows):
    return {"noise": torch.tensor([torch.rand(()).item(), random.random()], dtype=torch.float64)}


def collate_slowly(rows):
    time.sleep(MAKE_SECONDS)
    return collate(rows)


def numbers(batches):
    return [batch["input_ids"].tolist() for batch in batches]


def joined(lists):
    return list(itertools.chain(*lists))


def steps_of(rows=ROWS, rows_per_step=8, steps=12, seed=3, make=collate, **options):
    return step_loader(
        rows, rows_per_step=rows_per_step, steps=steps, seed=seed, collate=make, **options
    )


# --- the idea -------------------------------------------------------------------------------------


def test_by_hand_the_batches_are_the_same_and_wait_for_the_step():
    """The mistake: a thread that begins only when it is asked."""
    batches = [collate([row]) for row in ROWS[:5]]
    assert numbers(prefetched_by_hand(batches)) == numbers(batches)

    def slow_batches():
        for row in ROWS[:6]:
            yield collate_slowly([row])

    ahead = measure_stalls(prefetched_by_hand(slow_batches()), lambda batch: time.sleep(0.08))
    alone = measure_stalls(slow_batches(), lambda batch: time.sleep(0.08))
    assert ahead.share < 0.5 * alone.share


# --- the technique --------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "workers"), [(ROWS, 2), (Dataset.from_list(ROWS), 0)])
def test_a_run_that_starts_at_any_step_gets_the_batches_of_a_whole_run(rows, workers):
    """The mistake: an order that depends on the steps before, on the workers, or on no seed."""
    whole = numbers(steps_of())
    assert numbers(steps_of(rows, start=7, workers=workers)) == whole[7:]
    for epoch in (whole[:5], whole[5:10]):
        assert sorted(joined(epoch)) == list(range(40))
    assert whole[:5] != whole[5:10]
    assert numbers(steps_of(seed=4)) != whole


def test_a_step_has_the_same_rows_on_any_number_of_ranks():
    """The mistake: two ranks load the same rows."""
    whole = numbers(steps_of())
    for ranks in (2, 4):
        shares = [numbers(steps_of(rank=rank, ranks=ranks)) for rank in range(ranks)]
        for step, parts in enumerate(zip(*shares)):
            assert joined(parts) == whole[step]
    expected = [rows_of_step(step, rows=40, rows_per_step=8, seed=3) for step in range(12)]
    assert whole == expected


def test_random_numbers_belong_to_the_step_and_not_to_the_worker():
    """The mistake: noise that depends on the worker; or a loader that moves dropout's numbers."""
    before = (torch.get_rng_state(), random.getstate())
    whole = [batch["noise"] for batch in steps_of(make=collate_with_noise)]
    resumed = steps_of(make=collate_with_noise, start=5, workers=2)
    assert torch.equal(torch.stack([batch["noise"] for batch in resumed]), torch.stack(whole[5:]))
    other = steps_of(make=collate_with_noise, rank=1, ranks=2)
    assert all((a != b["noise"]).all() for a, b in zip(whole, other))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


# --- the effect -----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_the_stall_share_is_measured_and_predicted(workers):
    """The mistake: the wait for the device counts as a wait for the batch.

    Sleeping stands for a disk and for a GPU, so that two busy cores change little.
    """
    loader = steps_of(make=collate_slowly, workers=workers)
    stalls = measure_stalls(loader, lambda batch: time.sleep(STEP_SECONDS), warmup=4)
    predicted = predicted_stall_share(
        make_seconds=MAKE_SECONDS, step_seconds=STEP_SECONDS, workers=workers
    )
    assert len(stalls.waiting) == len(stalls.training) == 8
    assert stalls.share == pytest.approx(predicted, abs=0.15)


def test_what_cannot_be_shared_is_refused():
    """The mistake: rows that no rank loads."""
    with pytest.raises(ValueError, match="give a multiple of the 2 ranks"):
        steps_of(rows_per_step=9, rank=0, ranks=2)


@pytest.mark.gpu
def test_on_a_gpu_batches_come_from_pinned_memory():
    assert all(batch["input_ids"].is_pinned() for batch in steps_of(workers=1))
