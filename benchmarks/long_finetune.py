"""A fine-tuning run that is long enough to see: full fine-tuning and LoRA, with held-out points.

python -m benchmarks.long_finetune

Each trains SmolLM2 on functions of the standard library and their docstrings, on the same rows in
the same order. Every few steps the loss of the same held-out rows is taken.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import study
from recipes_lib.core.data import load_instructions
from recipes_lib.core.measure.machine import machine, seed_everything
from recipes_lib.core.model import load_model, load_tokenizer
from recipes_lib.core.model.default_model import model_source
from recipes_lib.fine_tuning.honest_evaluation import compare, held_out_losses
from recipes_lib.precision.mixed_precision import NAMES
from recipes_lib.workflows.finetune import loop
from recipes_lib.workflows.finetune.settings import Settings

RATES = {"full": 5e-5, "lora": 5e-4}


@dataclass(frozen=True)
class Length:
    """How long the runs are."""

    steps: int = 120
    rows: int = 4  # of a step
    tokens: int = 160  # of a row at most
    held_out: int = 60  # rows
    every: int = 20  # steps between two points


def train(length: Length, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The result so far, after each point."""
    tokenizer = load_tokenizer()
    pad = tokenizer.pad_token_id
    rows = list(load_instructions(tokenizer, max_tokens=length.tokens, limit=2000))
    held_out = list(
        load_instructions(
            tokenizer, split="validation", max_tokens=length.tokens, limit=length.held_out
        )
    )
    before = held_out_losses(load_model(), held_out, pad_token_id=pad)
    content: dict[str, Any] = {
        "settings": asdict(length) | {"rates": RATES},
        "source": model_source(),
        "pairs": len(rows),
        "before": before.mean,
        "curves": {},
        "verdicts": {},
    }
    for method, rate in RATES.items():
        seed_everything(0)
        run = Settings(
            base_model="smollm2",
            data_file="",
            output_dir="",
            method=method,
            learning_rate=rate,
            steps=length.steps,
            warmup_steps=length.steps // 20,
            rows_per_step=length.rows,
            micro_batch_size=length.rows,
            seq_len=length.tokens,
            precision=NAMES[machine().compute_dtype],
        )
        model = loop.adapt(load_model(), run=run)
        points = [(0, before.mean)]
        content["curves"][method] = points
        for step in loop.training_steps(model, rows, run=run, pad_token_id=pad):
            done = step.number + 1
            if done % length.every == 0 or done == length.steps:
                after = held_out_losses(model, held_out, pad_token_id=pad)
                points.append((done, after.mean))
                print(f"{method}: step {done}, held-out loss {after.mean:.3f}", flush=True)
                yield content
        content["verdicts"][method] = vars(compare(before, after))
        yield content


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and write the file after each point."""
    study.run("long_finetune", Length(), train, about=__doc__, arguments=arguments)


if __name__ == "__main__":
    main()
