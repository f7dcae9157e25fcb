"""Measure one technique beside the plain step: `python -m recipes_lib bench <technique>`.

    bench = Bench("llama-3.2-1b", batch_size=4, seq_len=512, micro_batches=4)
    bench.run("lora")                                   a ladder of two rows: baseline, lora
    bench.predict("lora").peak                          bytes, from a step on tensors without data
    bench.arrange("lora", bench.fresh())                model, optimizer and step, to use elsewhere

Both rows train a model with the same weights on the same batch, one after the other, each alone in
memory. What a technique does is in `entries.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from recipes_lib.core.checks import check_choice, check_whole
from recipes_lib.core.data import IGNORED, Batch
from recipes_lib.core.measure import bytes_alive, measure
from recipes_lib.core.measure.dry_run import real_tensors
from recipes_lib.core.measure.free_memory import release_memory
from recipes_lib.core.measure.machine import seed_everything
from recipes_lib.core.measure.timeline import Timeline, record_timeline
from recipes_lib.core.model import SHAPES, load_model, model_of_shape
from recipes_lib.core.model.marks import COMPILED, any_marked
from recipes_lib.core.predict import Prediction, Step, predict
from recipes_lib.report.ladders.memory import MemoryLadder
from recipes_lib.report.timeline import timeline_chart
from recipes_lib.workflows.bench.techniques import ENTRIES, Entry, plain_adamw, plain_step
from recipes_lib.workflows.bench.techniques import LR as LR  # the benchmarks train with it too


@dataclass
class Bench:
    """One model and one random batch [B, S]. Only gradient accumulation reads `micro_batches`."""

    model_name: str  # a hub id, a folder, or one of SHAPES with random weights
    batch_size: int
    seq_len: int
    micro_batches: int
    layers: int | None = None
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        check_whole(batch_size=self.batch_size, micro_batches=self.micro_batches)
        check_whole(least=2, seq_len=self.seq_len)  # the first token of a row is nobody's target
        if self.layers is not None and self.model_name not in SHAPES:
            raise ValueError(f"layers={self.layers}: only a shape has fewer: {', '.join(SHAPES)}")
        if self.batch_size % self.micro_batches:
            raise ValueError(
                f"micro_batches={self.micro_batches} must divide batch_size={self.batch_size}"
            )

    def fresh(self) -> Any:
        """The model, each time with the same weights."""
        seed_everything(0)
        if self.model_name in SHAPES:
            return model_of_shape(self.model_name, layers=self.layers, dtype=self.dtype)
        return load_model(self.model_name, dtype=self.dtype)

    def batch(self, model: Any) -> Batch:
        """The batch on the model's device, each time with the same tokens.

        As in instruction tuning, the second half of each row carries loss.
        """
        generator = torch.Generator().manual_seed(0)
        size = (self.batch_size, self.seq_len)
        with real_tensors():  # which tokens carry loss decides what a step allocates
            ids = torch.randint(0, model.config.vocab_size, size, generator=generator)  # [B, S]
            ids = ids.to(model.device)
            labels = ids.clone()
            labels[:, : self.seq_len // 2] = IGNORED
        return {"input_ids": ids, "labels": labels}

    def plain(
        self, model: Any, optimizer: torch.optim.Optimizer | None = None
    ) -> Callable[[], float]:
        """The plain step on `model` as it is now, for what has no entry here."""
        if optimizer is None:
            optimizer = plain_adamw(model)
        return partial(plain_step(self.batch(model)), model, optimizer)

    def arrange(self, name: str, model: Any) -> tuple[Any, torch.optim.Optimizer, Step]:
        """Technique `name`, or the "baseline", on a fresh `model`: model, optimizer and step."""
        entries = {"baseline": Entry(), **ENTRIES}
        check_choice(entries, technique=name)
        entry = entries[name]
        step = entry.step_of(self.batch(model), self.micro_batches)
        model = entry.adapt(model)
        return model, entry.optimizer_of(model), step

    def predict(self, name: str) -> Prediction:
        """The step with technique `name`, on tensors without data.

        Raises ValueError where such a step says nothing about the real one, with the reason.
        """

        def build() -> tuple[Any, torch.optim.Optimizer, Step]:
            model, optimizer, step = self.arrange(name, self.fresh())
            if any_marked(model.modules(), COMPILED):
                raise ValueError(
                    "no prediction: on tensors without data the blocks run as they were, and "
                    "compiled blocks keep less"
                )
            return model, optimizer, step

        return predict(build)

    def run(
        self,
        technique: str,
        *,
        repeats: int = 2,
        timeline: Path | None = None,
        announce: Callable[[str], None] | None = None,
    ) -> MemoryLadder:
        """Ladder of two rows, the plain step and the technique.

        Args:
            repeats: steps on the clock, of which the fastest counts.
            timeline: a file for the picture of the memory over one step of each row.
            announce: is called with the name of a row before it is measured.
        """
        check_choice(ENTRIES, technique=technique)
        ladder = MemoryLadder(f"bench_{technique}")
        predictions: dict[str, Prediction] = {}
        timelines: dict[str, Timeline] = {}
        for name in ("baseline", technique):
            if announce is not None:
                announce(name)
            alive = bytes_alive()
            model, optimizer, step = self.arrange(name, self.fresh())
            predicted = None
            try:
                predictions[name] = self.predict(name)
                predicted = predictions[name].peak
            except ValueError as error:
                print(f"{name}: {error}")
            losses: list[float] = []
            measured = measure(
                _noting(partial(step, model, optimizer), losses),
                tokens=self.batch_size * self.seq_len,
                repeats=repeats,
                model=model,
                optimizer=optimizer,
            ).without(alive)
            # That of equal weights: later steps have trained on this batch.
            ladder.add(name, measured, predicted=predicted, loss=losses[0])
            if timeline is not None:
                timelines[name] = measured.timeline
                if measured.timeline is None:  # of compiled blocks, in a step where they are plain
                    again = record_timeline(
                        partial(step, model, optimizer), model=model, optimizer=optimizer
                    )
                    timelines[name] = again.without(alive)
            del model, optimizer, step
            release_memory()  # the next row must not pay for this one's model
        if timeline is not None:
            _draw(timelines, predictions, timeline)
        return ladder


def techniques() -> list[str]:
    """Names that `Bench.run` takes."""
    return list(ENTRIES)


def _noting(step: Callable[[], float], losses: list[float]) -> Callable[[], float]:
    """The same step, which also notes its loss."""

    def noted() -> float:
        losses.append(step())
        return losses[-1]

    return noted


def _draw(timelines: dict[str, Timeline], predictions: dict[str, Prediction], path: Path) -> None:
    """Both timelines in one picture, with those that were predicted as lines."""
    predicted = {name: prediction.timeline for name, prediction in predictions.items()}
    title = "Memory over one step, without and with the technique"
    timeline_chart(timelines, predicted=predicted, title=title).savefig(path)
