import itertools
import random
import time
import warnings

import pytest
import torch
from datasets import Dataset
from torch import distributed

from recipes_lib.core.data import IGNORED
from recipes_lib.core.data.row_order import rows_of_step
from recipes_lib.training.data_loading import (
    measure_stalls,
    predicted_stall_share,
    predicted_waiting_bytes,
    predicted_workers,
    prefetched_by_hand,
    step_loader,
    stream_loader,
    to_device,
    until_all_end,
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


def flat(batches):
    return joined(numbers(batches))


def joined(lists):
    return list(itertools.chain(*lists))


def steps_of(rows=ROWS, rows_per_step=8, steps=12, seed=3, make=collate, **options):
    return step_loader(
        rows, rows_per_step=rows_per_step, steps=steps, seed=seed, collate=make, **options
    )


def make_stream(shards=4):
    return Dataset.from_list(ROWS).to_iterable_dataset(num_shards=shards)


def stream_of(shards=4, rows_per_step=6, shuffle_rows=7, **options):
    return stream_loader(
        make_stream(shards),
        rows_per_step=rows_per_step,
        shuffle_rows=shuffle_rows,
        collate=collate,
        **options,
    )


# --- the idea -------------------------------------------------------------------------------------


def test_by_hand_the_batches_are_the_same_and_wait_for_the_step():
    batches = [collate([row]) for row in ROWS[:5]]
    assert numbers(prefetched_by_hand(batches)) == numbers(batches)

    def slow_batches():
        for row in ROWS[:6]:
            yield collate_slowly([row])

    ahead = measure_stalls(prefetched_by_hand(slow_batches()), lambda batch: time.sleep(0.08))
    alone = measure_stalls(slow_batches(), lambda batch: time.sleep(0.08))
    assert ahead.share < 0.5 * alone.share


def test_by_hand_an_error_in_the_thread_arrives():
    """In a thread that dies silently the training would wait for ever."""

    def broken():
        yield collate(ROWS[:1])
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(prefetched_by_hand(broken()))


# --- rows that can be counted ---------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("rows", [ROWS, Dataset.from_list(ROWS)], ids=["list", "datasets"])
def test_a_run_that_starts_at_any_step_gets_the_batches_of_a_whole_run(rows, workers):
    """Two epochs and a bit: five steps each."""
    whole = numbers(steps_of())
    assert numbers(steps_of(rows, start=7, workers=workers)) == whole[7:]
    for epoch in (whole[:5], whole[5:10]):
        assert sorted(joined(epoch)) == list(range(40))
    assert whole[:5] != whole[5:10]


def test_a_step_has_the_same_rows_on_any_number_of_ranks():
    whole = numbers(steps_of())
    for ranks in (2, 4):
        shares = [numbers(steps_of(rank=rank, ranks=ranks)) for rank in range(ranks)]
        for step, parts in enumerate(zip(*shares)):
            assert joined(parts) == whole[step]
    expected = [rows_of_step(step, rows=40, rows_per_step=8, seed=3) for step in range(12)]
    assert whole == expected


def test_random_numbers_belong_to_the_step_and_not_to_the_worker():
    """And the random numbers of the training are not touched by a loader that comes and goes."""
    before = (torch.get_rng_state(), random.getstate())
    whole = [batch["noise"] for batch in steps_of(make=collate_with_noise)]
    resumed = steps_of(make=collate_with_noise, start=5, workers=2)
    assert torch.equal(torch.stack([batch["noise"] for batch in resumed]), torch.stack(whole[5:]))
    other = steps_of(make=collate_with_noise, rank=1, ranks=2)
    assert all((a != b["noise"]).all() for a, b in zip(whole, other))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


# --- streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [4, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_row_of_a_stream_is_on_one_rank_once(shards, ranks):
    found = []
    for rank in range(ranks):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # three shards for two ranks
            found += flat(stream_of(shards, rank=rank, ranks=ranks))
    assert sorted(found) == list(range(40))
    assert found != sorted(found)


@pytest.mark.parametrize(("workers", "ranks"), [(0, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("after", [1, 4])
def test_a_stream_goes_on_in_the_middle_of_an_epoch(after, workers, ranks):
    """Twice stopped: a position that was loaded is saved again, too."""
    options = {"workers": workers, "rank": ranks - 1, "ranks": ranks}
    whole = numbers(stream_of(**options))

    loader = stream_of(**options)
    source = iter(loader)
    got = [next(source) for _ in range(after)]
    for _ in range(2):
        state = loader.state_dict()
        loader = stream_of(**options)
        loader.load_state_dict(state)
        source = iter(loader)
        got.append(next(source, None))
    got = [batch for batch in got if batch is not None]
    assert numbers(got) + numbers(source) == whole


def test_the_order_of_a_stream_is_that_of_its_epoch():
    first = flat(stream_of())
    assert flat(stream_of()) == first
    assert flat(stream_of(epoch=1)) != first
    assert flat(stream_of(seed=1)) != first
    assert flat(stream_of(shuffle_rows=1)) == list(range(40))
    # Two blocks of seven rows, each in an order of its own.
    assert [number - 7 for number in first[7:14]] != first[:7]
    loader = stream_of()
    list(loader)
    with pytest.raises(ValueError, match="make a loader with the next `epoch`"):
        iter(loader)


def unequal_shares():
    """What every rank trains on if rank 1 has one row and rank 0 five; then if rank 1 has none."""
    rank = distributed.get_rank()
    found = []
    for sizes in ((5, 1), (2, 0)):
        own = [collate([row]) for row in ROWS[: sizes[rank]]]
        batches = list(until_all_end(own))
        counted = [int((batch["labels"] != IGNORED).sum()) for batch in batches]
        total = torch.tensor(counted)
        distributed.all_reduce(total)  # hangs or fails if the ranks had unequal numbers of steps
        found.append((len(batches), counted, total.tolist()))
    gathered = [None, None]
    distributed.all_gather_object(gathered, found)
    return gathered


def test_ranks_with_unequal_shares_end_together_and_lose_nothing(two_ranks):
    first, second = two_ranks.run(unequal_shares, timeout=60)
    assert first == [(5, [1, 1, 1, 1, 1], [2, 1, 1, 1, 1]), (2, [1, 1], [1, 1])]
    assert second == [(5, [1, 0, 0, 0, 0], [2, 1, 1, 1, 1]), (2, [0, 0], [1, 1])]


def test_without_ranks_nothing_is_added():
    assert numbers(until_all_end(stream_of())) == numbers(stream_of())


# --- the effect -----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_the_stall_share_is_measured_and_predicted(workers):
    """Sleeping stands for a disk and for a GPU, so that two busy cores change little."""
    loader = steps_of(make=collate_slowly, workers=workers)
    stalls = measure_stalls(loader, lambda batch: time.sleep(STEP_SECONDS), warmup=4)
    predicted = predicted_stall_share(
        make_seconds=MAKE_SECONDS, step_seconds=STEP_SECONDS, workers=workers
    )
    assert len(stalls.waiting) == len(stalls.training) == 8
    assert stalls.share == pytest.approx(predicted, abs=0.15)


def test_predictions():
    seconds = {"make_seconds": 0.06, "step_seconds": 0.04}
    assert predicted_stall_share(**seconds, workers=0) == pytest.approx(0.6)
    assert predicted_stall_share(**seconds, workers=1) == pytest.approx(1 / 3)
    assert predicted_stall_share(**seconds, workers=2) == 0
    assert predicted_workers(**seconds) == 2
    batch = collate(ROWS[:4])  # two tensors of four numbers of eight bytes
    assert predicted_waiting_bytes(batch, workers=3, prefetch=2) == 3 * 2 * 64


def test_batches_move_to_the_device():
    moved = list(to_device(steps_of(steps=2), "cpu"))
    assert numbers(moved) == numbers(steps_of(steps=2))


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows_per_step": 9, "rank": 0, "ranks": 2}, "give a multiple of the 2 ranks"),
        ({"rows_per_step": 41}, "from 1 to 40"),
        ({"start": 13}, "start=13: give a whole number from 0 to 12"),
        ({"rank": 2, "ranks": 2}, "rank=2: give a whole number from 0 to 1"),
        ({"rank": 1}, "give both, or none"),
        ({"workers": -1}, "workers=-1"),
        ({"prefetch": 0}, "prefetch=0"),
        ({"pin": True}, "there is no GPU here"),
        ({"rows": iter(ROWS)}, "use stream_loader"),
    ],
)
def test_bad_input_of_a_step_loader(options, message):
    with pytest.raises(ValueError, match=message):
        steps_of(**options)


def test_bad_input_of_a_stream_loader():
    with pytest.raises(ValueError, match="use step_loader for rows with a length"):
        stream_loader(ROWS, rows_per_step=4, collate=collate)
    # `datasets` loses the rows in its buffer: 6 of these 40 in the middle of an epoch.
    buffered = make_stream().shuffle(seed=1, buffer_size=8).map(dict)
    with pytest.raises(ValueError, match="would be lost in a resume"):
        stream_loader(buffered, rows_per_step=4, collate=collate)
    with pytest.raises(ValueError, match="give at most 2 workers"):
        stream_of(workers=3, rank=0, ranks=2)
    with pytest.warns(UserWarning, match="2 ranks do not divide the 3 shards"):
        stream_of(shards=3, rank=0, ranks=2)
    state = stream_of(rank=0, ranks=2).state_dict()
    with pytest.raises(ValueError, match=r"another share of the stream \(rank: 0 there, 1 here\)"):
        stream_of(rank=1, ranks=2).load_state_dict(state)
    with pytest.raises(ValueError, match="1 batches, warmup=1"):
        measure_stalls([collate(ROWS)], len)


@pytest.mark.gpu
def test_on_a_gpu_batches_come_from_pinned_memory():
    loader = steps_of(workers=1)
    assert all(batch["input_ids"].is_pinned() for batch in loader)
    moved = list(to_device(steps_of(workers=1), "cuda"))
    assert numbers(moved) == numbers(steps_of())
