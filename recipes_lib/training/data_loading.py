"""Data loading: the next batches are made by other processes while this one trains.

Problem    A step waits until its batch is read, tokenized and padded. The device stands still.
Idea       Make the next batches beside the training, a few of them ahead:

               without   [make 0][step 0][make 1][step 1][make 2][step 2]
               worker    [make 0][make 1][make 2][make 3] …
               training          [step 0][step 1][step 2] …              no waiting

           With several ranks each one loads its part of every step, and no row twice. The rows of a
           step are a function of its number, so there is nothing to save: a run that goes on at
           step n asks for step n.
Saves      The waiting. With w workers, L seconds to make a batch and S seconds of a step, a step
           takes max(S, L/w) in the place of L + S.
Costs      Processes, and the memory of the batches that wait: workers x prefetch of them. Workers
           need cores of their own: where the training uses all cores, they slow it down.
Use when   `measure_stalls` says that steps wait: text is tokenized on the way, files are far away,
           images are decoded.
Not when   Rows are tokenized already and lie in memory: making a batch then takes less than handing
           it over from another process. Streams, whose rows have no number, are not handled here:
           `StatefulDataLoader` keeps their position, but not the rows in a shuffle buffer.
In production   `DataLoader(num_workers=4, prefetch_factor=2, pin_memory=True)`;
           `TrainingArguments(dataloader_num_workers=4)`; `StatefulDataLoader` of torchdata;
           `datasets.distributed.split_dataset_by_node` for streams.
Source     PyTorch documentation, "torch.utils.data"; Hugging Face datasets, "Stream".

To pin memory means to forbid the system to move it, so that the GPU can fetch a batch by itself,
beside its own work.

Shapes: B rows of a step, over all ranks; S sequence.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from recipes_lib.core.data import Batch
from recipes_lib.core.data.row_order import rows_of_step
from recipes_lib.core.measure.machine import machine, synchronize
from recipes_lib.core.ranks import rank as own_rank
from recipes_lib.core.ranks import world_size

Collate = Callable[[list[Any]], Batch]

# --- the idea: what a learner can copy ------------------------------------------------------------


def prefetched_by_hand(batches: Iterable[Batch], *, ahead: int = 2) -> Iterator[Batch]:
    """The same batches in the same order, made by a thread while the caller trains."""
    source = iter(batches)
    with ThreadPoolExecutor(max_workers=1) as thread:
        waiting = deque(thread.submit(next, source, None) for _ in range(ahead))
        while waiting:
            batch = waiting.popleft().result()  # waits, if the batch is not made yet
            if batch is None:
                return
            waiting.append(thread.submit(next, source, None))
            yield batch  # the caller trains, and the thread makes the next one


# --- the technique --------------------------------------------------------------------------------


def step_loader(
    rows: Any,
    *,
    rows_per_step: int,
    steps: int,
    collate: Collate,
    start: int = 0,
    seed: int = 0,
    rank: int | None = None,
    ranks: int | None = None,
    workers: int = 0,
) -> DataLoader:
    """Let processes load this rank's part of the steps `start`, `start + 1`, … up to `steps`.

    A batch depends on the step, the seed and the rank only. A run that goes on at step n passes
    `start=n`, with any number of workers. On another number of ranks a step has the same rows.

    Args:
        rows: anything with a length and rows by number.
        rows_per_step: B, of all ranks together.
        steps: where the run ends, over all epochs.
        collate: makes a batch of a list of rows, in the worker. What it draws from `random` and
            `torch` is a function of the step and the rank, too.
        rank, ranks: by default those of the process group, or one rank without one.
        workers: processes that make batches; 0 makes them in this process, while the step waits.
    """
    if ranks is None:
        rank = own_rank()
        ranks = world_size()
    if rows_per_step % ranks:
        raise ValueError(f"rows_per_step={rows_per_step}: give a multiple of the {ranks} ranks")
    return DataLoader(
        StepData(rows, rows_per_step, collate, seed, rank, ranks),
        # The loader's items are whole batches, and their numbers are the steps.
        sampler=range(start, steps),
        batch_size=None,
        num_workers=workers,
        pin_memory=machine().device == "cuda",
        # By default a loader draws a number from those of the training, whose dropout would then
        # depend on when a loader is made.
        generator=torch.Generator(),
    )


@dataclass(frozen=True)
class StepData(Dataset):
    """Item number n is the batch of step n on this rank."""

    rows: Any
    rows_per_step: int
    collate: Collate
    seed: int
    rank: int
    ranks: int

    def __getitem__(self, step: int) -> Batch:
        """In a data-loading process: this rank's rows of a step, collated."""
        chosen = rows_of_step(
            step, rows=len(self.rows), rows_per_step=self.rows_per_step, seed=self.seed
        )
        share = self.rows_per_step // self.ranks
        mine = chosen[self.rank * share : (self.rank + 1) * share]
        with random_numbers_of(f"{self.seed} {step} {self.rank}"):
            return self.collate([self.rows[number] for number in mine])


@contextlib.contextmanager
def random_numbers_of(name: str) -> Iterator[None]:
    """In a data-loading process: what is drawn depends on `name` alone; nothing outside notices."""
    outside = random.getstate()
    with torch.random.fork_rng(devices=[]):
        random.seed(name)
        torch.manual_seed(random.getrandbits(63))
        try:
            yield
        finally:
            random.setstate(outside)


@dataclass(frozen=True)
class Stalls:
    """How long steps waited for their batches."""

    waiting: list[float]
    training: list[float]

    @property
    def share(self) -> float:
        """The part of the time in which no step ran but waited for data: 0 is best."""
        waited = sum(self.waiting)
        return waited / (waited + sum(self.training))


def measure_stalls(
    batches: Iterable[Batch], step: Callable[[Batch], Any], *, warmup: int = 1
) -> Stalls:
    """Run `step(batch)` on all batches, and tell how long each step waited and trained.

    The first `warmup` steps are not counted: workers start in them. The device is waited for after
    each step, so that its work does not look like waiting for the next batch.
    """
    waiting = []
    training = []
    source = iter(batches)
    while True:
        asked = time.perf_counter()
        batch = next(source, None)
        got = time.perf_counter()
        if batch is None:
            break
        step(batch)
        synchronize()
        waiting.append(got - asked)
        training.append(time.perf_counter() - got)
    return Stalls(waiting[warmup:], training[warmup:])


# --- the arithmetic -------------------------------------------------------------------------------


def predicted_stall_share(*, make_seconds: float, step_seconds: float, workers: int) -> float:
    """The share of the time in which steps wait, if data takes L seconds per batch and steps S.

    Without workers it is L / (L + S). With them a batch is ready every L / w seconds, so that a
    step waits for what is left of that after S.
    """
    if workers == 0:
        return make_seconds / (make_seconds + step_seconds)
    between = max(step_seconds, make_seconds / workers)
    return (between - step_seconds) / between
