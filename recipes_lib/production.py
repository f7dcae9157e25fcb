"""The same fine-tuning run through the libraries that people use in production: the Trainer and TRL.

Both take the model (with its adapters), the rows and the `Settings` that `finetune.training_steps` takes, train on
the same rows in the same order, and return the same `Step`s, so that losses and seconds can be laid side by side.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from recipes_lib.core.data import collate
from recipes_lib.core.machine import machine, require, synchronize
from recipes_lib.export import Settings, sft_arguments, trainer_arguments
from recipes_lib.finetune import Row, Step, check_run
from recipes_lib.training.exact_resume import rows_of_step
from recipes_lib.training.sequence_packing import collate_packed


def hf_trainer(
    model: Any, rows: Sequence[Row], *, run: Settings, pad_token_id: int, turn: Callable[[], Any] | None = None
) -> list[Step]:
    """Train with `transformers.Trainer`, with our batches: no attention mask, packed rows as they are.

    `turn` is called before each step, outside its time: what is compared with the Trainer takes turns with it.
    """
    import transformers

    together = collate_packed if "position_ids" in rows[0] else collate
    return _train(
        transformers.Trainer,
        model,
        rows,
        run=run,
        turn=turn,
        args=transformers.TrainingArguments(**trainer_arguments(**_fields(run)), **_options()),
        data_collator=lambda part: together(part, pad_token_id=pad_token_id),
    )


def trl_sft(
    model: Any, rows: Sequence[Row], *, run: Settings, tokenizer: Any, turn: Callable[[], Any] | None = None
) -> list[Step]:
    """Train with `trl.SFTTrainer`, which makes its own batches of our tokens and labels; `turn` as above."""
    trl = require("trl")
    args = trl.SFTConfig(**sft_arguments(**_fields(run)), **_options())
    return _train(trl.SFTTrainer, model, rows, run=run, turn=turn, args=args, processing_class=tokenizer)


def _train(
    kind: Any, model: Any, rows: Sequence[Row], *, run: Settings, turn: Callable[[], Any] | None, **options: Any
):
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback

    check_run(rows, run=run, folder=None, resume=False)
    settings = {"rows": len(rows), "rows_per_step": run.rows_per_step, "seed": run.seed}
    order = [i for number in range(run.steps) for i in rows_of_step(number, **settings)]
    steps: list[Step] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if turn:
                turn()
            self.start = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            synchronize()
            self.seconds = time.perf_counter() - self.start

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            if "loss" in logs:
                n = run.rows_per_step
                tokens = sum(len(rows[i]["input_ids"]) for i in order[len(steps) * n : len(steps) * n + n])
                values = (logs["loss"], logs["grad_norm"], logs["learning_rate"])
                steps.append(Step(len(steps), *values, seconds=self.seconds, loading=0.0, tokens=tokens))

    trainer = kind(model=model, train_dataset=Dataset.from_list([rows[i] for i in order]), **options)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Clock())
    trainer.train()
    return steps


def _options() -> dict[str, Any]:
    """Our rows come in the order of training, with columns of their own, and the losses are shown by who calls."""
    options = {"train_sampling_strategy": "sequential", "remove_unused_columns": False, "disable_tqdm": True}
    return options | {"dataloader_pin_memory": machine().device == "cuda"}  # it warns on a CPU


def _fields(run: Settings) -> dict[str, Any]:
    return {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
