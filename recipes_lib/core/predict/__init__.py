"""How many bytes a step will need, before it runs: the step itself, on tensors without data.

    def build():
        model = model_of_shape("llama-3.1-8b", dtype=torch.bfloat16)
        return model, torch.optim.AdamW(model.parameters()), step      # step(model, optimizer)

    predicted = predict(build)
    predicted.peak                       # bytes of tensors at the highest point
    predicted.timeline.at_peak()         # what they consist of, as after a measured step
    predict(build, card=CARDS["L4"]).reserved      # what decides whether it fits
    predict(build, ranks=8)              # one rank of eight that do not exist

Nothing in `build` has to know of it: recipes, libraries and loops run as they are, and the account
is that of a measured step. What a prediction cannot know are values, times, and the scratch memory
inside of kernels. `equation.py` says the same of a plain step by arithmetic, in lines to read
aloud, and knows nothing of this.

allocator  PyTorch's allocator for a GPU, replayed: allocated and reserved bytes
any_size  a step of any depth from a few shallow ones
card  a GPU that is not there: its memory, and the kernels that it would choose
equation  the memory of a step by arithmetic
flops  how many operations of matrix products a step needs
pretended_ranks  one rank among many, without the others
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from recipes_lib.core.checks import check_whole
from recipes_lib.core.measure.dry_run import dry, dry_run
from recipes_lib.core.measure.live_bytes import LiveBytes
from recipes_lib.core.measure.timeline import Timeline, TimelineRecorder, record_timeline
from recipes_lib.core.predict.allocator import Allocator
from recipes_lib.core.predict.card import CARDS, Card, on_card
from recipes_lib.core.predict.pretended_ranks import buckets_without_data, pretended_ranks

__all__ = ["CARDS", "Build", "Card", "Prediction", "predict"]

Step = Callable[[Any, Any], Any]
Build = Callable[[], tuple[Any, Any, Step]]

MOST_WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Prediction:
    """A step that has not run: its bytes over time, by kind and phase.

    On a card `allocated` and `reserved` are the peaks of PyTorch's allocator. It fits where
    `reserved` is at most `card.for_tensors`, which leaves room for CUDA's own context.
    """

    timeline: Timeline
    allocated: int | None = None
    reserved: int | None = None

    @property
    def peak(self) -> int:
        """Bytes of tensors at the highest point."""
        return self.timeline.peak

    @property
    def kept(self) -> int:
        """Predicted bytes between two steps."""
        return self.timeline.points[-1].total

    def at_peak(self) -> dict[str, int]:
        """What the predicted peak consists of, by kind."""
        return self.timeline.at_peak()


def predict(
    build: Build,
    *,
    card: Card | None = None,
    allocator: bool = True,
    ranks: int = 1,
) -> Prediction:
    """Predict the step that `build` makes, on tensors without data.

    Args:
        build: returns the model, its optimizer and a function `step(model, optimizer)`. It is
            called once. Batches and other tensors from outside may be real.
        card: a GPU that may not be there. Its kernels are chosen, and its allocator is replayed.
        allocator: without it there is one step in place of two, and no reserved bytes.
        ranks: so many processes train together. All but this one are pretended.
    Raises ValueError where the step decides by values, reads a file that is not there, or does
    what PyTorch cannot do without data; what a recipe refuses, it refuses here, too.
    """
    check_whole(ranks=ranks)
    if dry():
        raise ValueError("this is a dry run already: call predict outside of it")
    with _pretended_group_of(ranks), dry_run(), on_card(card), _explained():
        on_cards_allocator = card is not None and allocator
        # In a group the first step plans operators on shards, on tensors of full size.
        if ranks == 1 and not on_cards_allocator:
            return Prediction(_first_step(build))
        replayed = Allocator(limit_bytes=None if card is None else card.for_tensors)
        emptied = mock.patch.object(torch.cuda, "empty_cache", replayed.empty_cache)
        with LiveBytes("cuda", listener=replayed) as account, emptied:
            timeline = _second_step(build, account, replayed, card)
        if not on_cards_allocator:
            return Prediction(timeline)
        return Prediction(timeline, replayed.peak_allocated, replayed.peak_reserved)


@contextlib.contextmanager
def _pretended_group_of(ranks: int) -> Iterator[None]:
    if ranks == 1:
        yield
        return
    with pretended_ranks(ranks), buckets_without_data():
        yield


def _first_step(build: Build) -> Timeline:
    """A predicted first step makes the optimizer's states, as if they had been there before."""
    model, optimizer, step = build()
    for _ in range(MOST_WARM_UP_STEPS):
        timeline = record_timeline(lambda: step(model, optimizer), model=model, optimizer=optimizer)
        if optimizer is None or optimizer.state:
            break
    return timeline.with_states_from_the_start()


def _second_step(
    build: Build, account: LiveBytes, allocator: Allocator, card: Card | None
) -> Timeline:
    """A predicted second step finds the states, with the peaks of the allocator."""
    model, optimizer, step = build()
    if card is not None:
        allocator.take_workspaces(card.workspace)
    step(model, optimizer)
    allocator.restart_peak()
    gc.collect()
    with TimelineRecorder(model, optimizer) as recorder:
        # What a compiler has traced holds tensors that nobody allocated: the account knows none.
        traced = recorder.account.current - account.current
        step(model, optimizer)
    return recorder.timeline().without(traced)


@contextlib.contextmanager
def _explained():
    """What keeps a step from being predicted: PyTorch's own error, as one sentence."""
    try:
        yield
    except (ValueError, torch.OutOfMemoryError):
        raise
    except OSError as error:
        raise ValueError(
            f"no prediction: build() reads a file or the network ({_first_line(error)}); load "
            f"outside of it what it needs"
        ) from error
    except (RuntimeError, NotImplementedError, TypeError, AssertionError) as error:
        raise ValueError(
            f"no prediction: the step fails on tensors without data with "
            f"{type(error).__name__} ({_first_line(error)}); measure this one with PeakMemory"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
