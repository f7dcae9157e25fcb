"""The same fine-tuning run through the libraries that people use in production: the Trainer and TRL.

Both take the model (with its adapters), the rows and the `Settings` that `finetune.training_steps` takes, train on
the same rows in the same order, and return the same `Step`s, so that losses and seconds can be laid side by side.
`write_production` leaves the run as files for Axolotl and accelerate.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from recipes_lib.core.data import collate
from recipes_lib.core.machine import machine, require, synchronize
from recipes_lib.core.measure import PeakMemory
from recipes_lib.training.exact_resume import rows_of_step
from recipes_lib.training.sequence_packing import collate_packed
from recipes_lib.workflows.finetune.export import (
    accelerate_config,
    axolotl_config,
    sft_arguments,
    trainer_arguments,
    write_messages,
    write_yaml,
)
from recipes_lib.workflows.finetune.loop import Row, Step, check_run, training_steps
from recipes_lib.workflows.finetune.settings import Settings

LIBRARIES = ("Trainer", "SFTTrainer")
WRITTEN = ("train.jsonl", "axolotl.yml", "accelerate.yml")  # by write_production


def hf_trainer(
    model: Any,
    rows: Sequence[Row],
    *,
    run: Settings,
    pad_token_id: int,
    turn: Callable[[], Any] | None = None,
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
    model: Any,
    rows: Sequence[Row],
    *,
    run: Settings,
    tokenizer: Any,
    turn: Callable[[], Any] | None = None,
) -> list[Step]:
    """Train with `trl.SFTTrainer`, which makes its own batches of our tokens and labels; `turn` as above."""
    trl = require("trl")
    args = trl.SFTConfig(**sft_arguments(**_fields(run)), **_options())
    return _train(
        trl.SFTTrainer, model, rows, run=run, turn=turn, args=args, processing_class=tokenizer
    )


def side_by_side(
    make: Callable[[], Any],
    rows: Sequence[Row],
    *,
    run: Settings,
    tokenizer: Any,
    libraries: Sequence[str] = LIBRARIES,
) -> dict[str, dict[str, Any]]:
    """The same run through our loop and each library: `losses`, `peak_bytes`, and tokens per second measured in turns.

    `make` gives a fresh adapted model. Peaks are of two steps of each alone; then our loop and a library take turns.
    Returns name -> facts; `time_ratio` is our time over the library's, the median over the steps after the first.
    """
    pad = {"pad_token_id": tokenizer.pad_token_id}
    ways = {
        "Trainer": lambda run, turn: hf_trainer(make(), rows, run=run, turn=turn, **pad),
        "SFTTrainer": lambda run, turn: trl_sft(
            make(), rows, run=run, turn=turn, tokenizer=tokenizer
        ),
    }

    def peak_of(way: Callable[[Settings], Any]) -> int:
        gc.collect()
        with PeakMemory() as memory:
            way(dataclasses.replace(run, steps=2, warmup_steps=min(1, run.warmup_steps)))
        return memory.peak

    # All peaks come first: the loop of a turn keeps its model alive, which would count.
    peak = peak_of(lambda run: list(training_steps(make(), rows, run=run, **pad)))
    found: dict[str, dict[str, Any]] = {"ours": {"peak_bytes": peak}}
    for name in libraries:
        found[name] = {"peak_bytes": peak_of(lambda run, name=name: ways[name](run, None))}
    speeds: list[float] = []
    for name in libraries:
        ours: list[Step] = []
        loop = training_steps(make(), rows, run=run, **pad)
        theirs = ways[name](run, lambda loop=loop, ours=ours: ours.append(next(loop)))
        loop.close()  # frees our model
        ratio = statistics.median(
            a.seconds / b.seconds for a, b in zip(ours[1:], theirs[1:], strict=True)
        )
        found[name] |= {"losses": [step.loss for step in theirs], "time_ratio": ratio}
        found["ours"]["losses"] = [step.loss for step in ours]
        speeds += [step.tokens / step.seconds for step in ours[1:]]
    speed = found["ours"]["tokens_per_second"] = statistics.median(speeds)
    for name in libraries:  # by the ratio: the machine was not equally fast in all turns
        found[name]["tokens_per_second"] = speed * found[name]["time_ratio"]
    return found


def table(found: dict[str, dict[str, Any]]) -> str:
    """What `side_by_side` found, a line each: useful tokens per second, peak, and the loss of every step."""
    lines = []
    for name, facts in found.items():
        ratio = (
            f" (ours takes {facts['time_ratio']:.2f}× its time)" if "time_ratio" in facts else ""
        )
        losses = " ".join(f"{loss:.4f}" for loss in facts["losses"])
        peak = f"peak {facts['peak_bytes'] / 2**20:,.0f} MiB"
        lines.append(
            f"{name:<11}{facts['tokens_per_second']:,.0f} tokens/s{ratio}, {peak}, losses {losses}"
        )
    return "\n".join(lines)


def write_production(run: Settings, pairs: Sequence[dict[str, Any]]) -> None:
    """The data and the configurations with which Axolotl and accelerate repeat the run."""
    folder = Path(run.output_dir)
    run = dataclasses.replace(run, data_file=folder / "train.jsonl")
    write_messages(pairs, run.data_file, overwrite=True)
    settings = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
    settings["output_dir"] = folder / "axolotl"
    launch = {
        "precision": run.precision,
        "processes": run.processes,
        "cpu": machine().device == "cpu",
    }
    for name, make in (
        ("axolotl", lambda: axolotl_config(**settings)),
        ("accelerate", lambda: accelerate_config(**launch)),
    ):
        try:
            write_yaml(make(), folder / f"{name}.yml", overwrite=True)
        except ValueError as error:
            print(f"no {name}.yml, which cannot say this run: {error}")


def _train(
    kind: Any,
    model: Any,
    rows: Sequence[Row],
    *,
    run: Settings,
    turn: Callable[[], Any] | None,
    **options: Any,
):
    import datasets
    from transformers import PrinterCallback, TrainerCallback

    check_run(rows, run=run, folder=None, resume=False)
    settings = {"rows": len(rows), "rows_per_step": run.rows_per_step, "seed": run.seed}
    options["args"]._n_gpu = min(
        1, options["args"].n_gpu
    )  # several would be DataParallel, with a batch for each
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

        def on_log(
            self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any
        ) -> None:
            if "loss" in logs:
                n = run.rows_per_step
                tokens = sum(
                    len(rows[i]["input_ids"]) for i in order[len(steps) * n : len(steps) * n + n]
                )
                values = (logs["loss"], logs["grad_norm"], logs["learning_rate"])
                steps.append(
                    Step(len(steps), *values, seconds=self.seconds, loading=0.0, tokens=tokens)
                )

    datasets.disable_progress_bars()  # TRL maps the rows more than once
    try:
        trainer = kind(
            model=model,
            train_dataset=datasets.Dataset.from_list([rows[i] for i in order]),
            **options,
        )
    finally:
        datasets.enable_progress_bars()
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Clock())
    trainer.train()
    return steps


def _options() -> dict[str, Any]:
    """Our rows come in the order of training, with columns of their own, and the losses are shown by who calls."""
    options = {
        "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,
        "disable_tqdm": True,
    }
    cuda = machine().device == "cuda"
    return options | {"dataloader_pin_memory": cuda, "use_cpu": not cuda}  # pinning warns on a CPU


def _fields(run: Settings) -> dict[str, Any]:
    return {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
