"""Measure one technique beside the plain step: `python -m recipes_lib bench <technique>`.

    bench = Bench("llama-3.2-1b", batch_size=4, seq_len=512, micro_batches=4)
    bench.run("lora")                                   a ladder of two rows: baseline, lora
    bench.arrange("lora", bench.fresh())                the step itself, to be used elsewhere

Both rows train a model with the same weights on the same batch, one after the other, each alone in
memory. What a technique does is in `entries.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recipes_lib.core.checks import check_choice, check_whole
from recipes_lib.core.data import IGNORED
from recipes_lib.core.measure import Measurement, measure
from recipes_lib.core.measure.machine import seed_everything
from recipes_lib.core.measure.memory import release_memory
from recipes_lib.core.measure.timeline import Timeline, record_timeline
from recipes_lib.core.model import SHAPES, load_model, model_of_shape
from recipes_lib.core.predict.budget import Budget, Shape
from recipes_lib.core.predict.plain_step import budget_of
from recipes_lib.report.ladders.memory import MemoryLadder
from recipes_lib.report.timeline import timeline_chart
from recipes_lib.workflows.bench.entries import (
    ENTRIES,
    Arranged,
    baseline,
    plain_adamw,
    training_step,
)
from recipes_lib.workflows.bench.entries import LR as LR  # the benchmarks train with it too


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

    @property
    def shape(self) -> Shape:
        """The whole batch in one pass."""
        return Shape(batch=self.batch_size, seq=self.seq_len)

    @property
    def targets(self) -> int:
        """Tokens of the batch that carry loss: as in instruction tuning, half of each row."""
        return self.batch_size * (self.seq_len - self.seq_len // 2)

    def fresh(self) -> Any:
        """The model, each time with the same weights."""
        seed_everything(0)
        if self.model_name in SHAPES:
            return model_of_shape(self.model_name, layers=self.layers, dtype=self.dtype)
        return load_model(self.model_name, dtype=self.dtype)

    def batch(self, model: Any) -> dict[str, torch.Tensor]:
        """The batch on the model's device, each time with the same tokens."""
        generator = torch.Generator().manual_seed(0)
        size = (self.batch_size, self.seq_len)
        ids = torch.randint(0, model.config.vocab_size, size, generator=generator)  # [B, S]
        ids = ids.to(model.device)
        labels = ids.clone()
        labels[:, : self.seq_len // 2] = IGNORED
        return {"input_ids": ids, "labels": labels}

    def budget(self, model: Any) -> Budget:
        """The predicted budget of the plain step, from which the estimates of the entries start."""
        return budget_of(model, self.shape)

    def plain(
        self, model: Any, optimizer: torch.optim.Optimizer | None = None
    ) -> Callable[[], float]:
        """The plain step on `model` as it is now, for what has no entry here."""
        if optimizer is None:
            optimizer = plain_adamw(model)
        return training_step(model, optimizer, self.batch(model))

    def arrange(self, name: str, model: Any) -> Arranged:
        """The step with technique `name`, or that of the "baseline", on a fresh `model`."""
        entries = {"baseline": baseline, **ENTRIES}
        check_choice(entries, technique=name)
        return entries[name](self, model)

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
        timelines = {}
        for name in ("baseline", technique):
            if announce is not None:
                announce(name)
            arranged = self.arrange(name, self.fresh())
            losses: list[float] = []
            measured = measure(
                _noting(arranged.step, losses),
                tokens=self.shape.tokens,
                repeats=repeats,
                model=arranged.model,
                optimizer=arranged.optimizer,
            )
            # That of equal weights: later steps have trained on this batch.
            ladder.add(name, measured, predicted=arranged.plan.peak, loss=losses[0])
            if timeline is not None:
                timelines[name] = _timeline_of(arranged, measured)
            del arranged
            release_memory()  # the next row must not pay for this one's model
        if timeline is not None:
            _draw(timelines, ladder, timeline)
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


def _timeline_of(arranged: Arranged, measured: Measurement) -> Timeline:
    """The memory over one step. For compiled blocks that of another step, in which they are plain.

    The allocator has measured their peak, and it does not know the kinds of tensors.
    """
    if measured.timeline is not None:
        return measured.timeline
    return record_timeline(arranged.step, model=arranged.model, optimizer=arranged.optimizer)


def _draw(timelines: dict[str, Timeline], ladder: MemoryLadder, path: Path) -> None:
    """Both timelines in one picture, with the predicted peaks as lines."""
    predicted = {row.name: row.predicted_bytes for row in ladder.rows}
    title = "Memory over one step, without and with the technique"
    timeline_chart(timelines, predicted=predicted, title=title).savefig(path)
