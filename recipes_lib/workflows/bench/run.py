"""Measure one technique beside the plain step: `python -m recipes_lib bench <technique>`.

    bench = Bench("llama-3.2-1b", batch_size=4, seq_len=512, micro_batches=4)
    bench.run("lora")                                   a ladder of two rows: baseline, lora
    bench.predict("lora").peak                          bytes, from a step on tensors without data
    bench.arrange("lora", bench.fresh())                model, optimizer and step, to use elsewhere

Both rows train a model with the same weights on the same batch. What a technique does is in
`techniques.py`.
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
from recipes_lib.core.measure.dry_run import real_tensors
from recipes_lib.core.measure.machine import seed_everything
from recipes_lib.core.model import SHAPES, load_model, model_of_shape
from recipes_lib.core.predict import Prediction, Step, predict
from recipes_lib.report.charts.memory_timeline import timeline_chart
from recipes_lib.report.ladders.memory import MemoryLadder
from recipes_lib.workflows.bench.techniques import ENTRIES, Entry, plain_adamw, plain_training_step
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
        """Raise ValueError for a batch that no technique can be measured on."""
        check_whole(batch_size=self.batch_size, micro_batches=self.micro_batches)
        check_whole(least=2, seq_len=self.seq_len)  # the first token of a row is nobody's target
        if self.layers is not None and self.model_name not in SHAPES:
            raise ValueError(f"layers={self.layers}: only a shape has fewer: {', '.join(SHAPES)}")
        if self.batch_size % self.micro_batches:
            raise ValueError(
                f"micro_batches={self.micro_batches} must divide batch_size={self.batch_size}"
            )

    def fresh(self) -> Any:
        """The model to measure a technique on, each time with the same weights."""
        seed_everything(0)
        if self.model_name in SHAPES:
            return model_of_shape(self.model_name, layers=self.layers, dtype=self.dtype)
        return load_model(self.model_name, dtype=self.dtype)

    def batch(self, model: Any) -> Batch:
        """The batch to measure a technique on, each time with the same tokens.

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
        return partial(plain_training_step(self.batch(model)), model, optimizer)

    def arrange(self, name: str, model: Any) -> tuple[Any, torch.optim.Optimizer, Step]:
        """Technique `name` to measure, or the "baseline": model, optimizer and step."""
        entries = {"baseline": Entry(), **ENTRIES}
        check_choice(entries, technique=name)
        entry = entries[name]
        step = entry.step_of(self.batch(model), self.micro_batches)
        model = entry.adapt(model)
        return model, entry.optimizer_of(model), step

    def build(self, name: str) -> tuple[Any, torch.optim.Optimizer, Step]:
        """Technique `name`, or the "baseline", on a model of its own."""
        return self.arrange(name, self.fresh())

    def predict(self, name: str) -> Prediction:
        """The step with technique `name`, on tensors without data."""
        return predict(partial(self.build, name))

    def run(self, technique: str, *, rounds: int = 3, timeline: Path | None = None) -> MemoryLadder:
        """Measure the technique beside the plain step: a ladder of two rows.

        Args:
            rounds: turns of both, of which the fastest counts.
            timeline: a file for the picture of the memory over one step of each row.
        """
        check_choice(ENTRIES, technique=technique)
        ladder = MemoryLadder(f"bench_{technique}")
        for name in ("baseline", technique):
            ladder.climb(name, partial(self.build, name))
        ladder.take_turns(rounds)
        if timeline is not None:
            predicted = {name: each.timeline for name, each in ladder.predictions.items()}
            shown = predicted | ladder.timelines  # of compiled blocks there is only the prediction
            title = "Memory over one step, without and with the technique"
            timeline_chart(shown, predicted=predicted, title=title).savefig(timeline)
        return ladder
