"""A fine-tuning run that is long enough to see: full fine-tuning and LoRA, with held-out points.

python -m benchmarks.long_finetune

Each trains SmolLM2 on functions of the standard library and their docstrings, on the same rows in
the same order. Every few steps the loss of the same held-out rows is taken, and at the end the
model writes answers, uncut. `runs/long_finetune.json` is written after each point.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import study
from recipes_lib.core.data import load_instructions
from recipes_lib.core.data.chat import IGNORED
from recipes_lib.core.data.evaluation import generate_answers
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
    answers: int = 6
    answer_tokens: int = 80


def train(
    length: Length, options: argparse.Namespace, older: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """The result so far, after each point."""
    tokenizer = load_tokenizer()
    pad = tokenizer.pad_token_id
    rows = list(load_instructions(tokenizer, max_tokens=length.tokens, limit=2000))
    held_out = list(
        load_instructions(
            tokenizer, split="validation", max_tokens=length.tokens, limit=length.held_out
        )
    )
    asked = held_out[: length.answers]
    wanted = [
        tokenizer.decode([token for token in row["labels"] if token != IGNORED][:-1])
        for row in asked
    ]

    def answers_of(model: Any) -> list[str]:
        return generate_answers(
            model, tokenizer=tokenizer, prompts=asked, max_new_tokens=length.answer_tokens
        )

    model = load_model()
    before = held_out_losses(model, held_out, pad_token_id=pad)
    content: dict[str, Any] = {
        "settings": asdict(length) | {"rates": RATES},
        "source": model_source(),
        "pairs": len(rows),
        "wanted": wanted,
        "before": {"loss": before.mean, "answers": answers_of(model)},
        "curves": {},
        "verdicts": {},
        "answers": {},
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
                yield content
        content["verdicts"][method] = vars(compare(before, after))
        content["answers"][method] = answers_of(model)
        yield content


def summary(content: dict[str, Any]) -> str:
    """A line per method: where it is."""
    lines = []
    for method, points in content["curves"].items():
        done, loss = points[-1]
        lines.append(f"{method}: step {done}, held-out loss {loss:.3f}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and write the file after each point."""
    study.run("long_finetune", Length(), train, about=__doc__, arguments=arguments, summary=summary)


if __name__ == "__main__":
    main()
