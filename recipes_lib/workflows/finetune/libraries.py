"""The same fine-tuning run through the libraries of production: the Trainer and TRL.

Both take the model (with its adapters), the rows and the `Settings` that `loop.training_steps`
takes, train on the same rows in the same order, and return the same `Step`s, so that losses and
seconds can be laid side by side.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from recipes_lib.core.data import collate
from recipes_lib.core.data.chat import Row
from recipes_lib.core.measure.machine import machine, require, synchronize
from recipes_lib.fine_tuning.adapter_files import without_hub_warnings
from recipes_lib.training.sequence_packing import collate_packed
from recipes_lib.workflows.finetune.loop import (
    Step,
    check_run,
    rows_of_optimizer_step,
)
from recipes_lib.workflows.finetune.production import sft_arguments, trainer_arguments
from recipes_lib.workflows.finetune.settings import Settings

# --- one run through one library ------------------------------------------------------------------


def hf_trainer(
    model: Any,
    rows: Sequence[Row],
    *,
    run: Settings,
    pad_token_id: int,
) -> list[Step]:
    """Train with `transformers.Trainer` and our batches: no attention mask, rows packed or not."""
    import transformers

    make_batch = collate_packed if "position_ids" in rows[0] else collate

    def collate_rows(part: Sequence[Row]) -> dict[str, Any]:
        return make_batch(part, pad_token_id=pad_token_id)

    arguments = transformers.TrainingArguments(**trainer_arguments(run), **_our_options())
    options = {"args": arguments, "data_collator": collate_rows}
    return _train(transformers.Trainer, model, rows, run=run, **options)


def trl_sft(
    model: Any,
    rows: Sequence[Row],
    *,
    run: Settings,
    tokenizer: Any,
) -> list[Step]:
    """Train with `trl.SFTTrainer`, which makes batches of its own from our tokens and labels."""
    trl = require("trl")
    arguments = trl.SFTConfig(**sft_arguments(run), **_our_options())
    options = {"args": arguments, "processing_class": tokenizer}
    return _train(trl.SFTTrainer, model, rows, run=run, **options)


def _our_options() -> dict[str, Any]:
    """Our rows come in the order of training, with columns that the Trainer would drop."""
    on_gpu = machine().device == "cuda"
    return {
        "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,
        "disable_tqdm": True,
        "dataloader_pin_memory": on_gpu,  # pinning warns on a CPU
        "use_cpu": not on_gpu,
    }


def _train(
    kind: Any,
    model: Any,
    rows: Sequence[Row],
    *,
    run: Settings,
    args: Any,
    **options: Any,
) -> list[Step]:
    """Train with a Trainer of this `kind`, and collect its steps."""
    import datasets
    from transformers import PrinterCallback

    check_run(rows, run=run, folder=None, resume=False)
    args._n_gpu = min(1, args.n_gpu)  # several would be DataParallel, with a batch for each
    # All rows in the order of our loop: the Trainer then takes them one after the other.
    ordered: list[Row] = []
    tokens: list[int] = []  # of each step
    for number in range(run.steps):
        chosen = rows_of_optimizer_step(number, rows, run=run)
        ordered += chosen
        tokens.append(sum(len(row["input_ids"]) for row in chosen))

    datasets.disable_progress_bars()  # TRL maps the rows more than once
    try:
        data = datasets.Dataset.from_list(ordered)
        trainer = kind(model=model, train_dataset=data, args=args, **options)
    finally:
        datasets.enable_progress_bars()
    steps: list[Step] = []
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(_clock(steps, tokens))
    with without_hub_warnings():  # a Trainer saves, too
        trainer.train()
    return steps


def _clock(steps: list[Step], tokens: Sequence[int]) -> Any:
    """A callback that times each step of a Trainer and appends it to `steps`."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            synchronize()  # a GPU is still at work when Python is done
            self.seconds = time.perf_counter() - self.start

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "loss" not in logs:  # the summary at the end has none
                return
            number = len(steps)
            numbers = [logs[name] for name in ("loss", "grad_norm", "learning_rate")]
            steps.append(Step(number, *numbers, self.seconds, tokens[number]))

    return Clock()
