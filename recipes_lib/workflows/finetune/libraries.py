"""The same fine-tuning run through the libraries of production: the Trainer and TRL.

Both take the model (with its adapters), the rows and the `Settings` that `loop.training_steps`
takes, train on the same rows in the same order, and return the same `Step`s, so that losses and
seconds can be laid side by side.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from recipes_lib.core.data import collate
from recipes_lib.core.data.chat import Row
from recipes_lib.core.measure import PeakMemory
from recipes_lib.core.measure.machine import machine, require, synchronize
from recipes_lib.core.measure.memory import release_memory
from recipes_lib.fine_tuning.adapter_files import without_hub_warnings
from recipes_lib.training.sequence_packing import collate_packed
from recipes_lib.workflows.finetune.loop import (
    Step,
    check_run,
    rows_of_optimizer_step,
    training_steps,
)
from recipes_lib.workflows.finetune.production import sft_arguments, trainer_arguments
from recipes_lib.workflows.finetune.settings import Settings

LIBRARIES = ("Trainer", "SFTTrainer")

# --- one run through one library ------------------------------------------------------------------


def hf_trainer(
    model: Any,
    rows: Sequence[Row],
    *,
    run: Settings,
    pad_token_id: int,
    turn: Callable[[], Any] | None = None,
) -> list[Step]:
    """Train with `transformers.Trainer` and our batches: no attention mask, rows packed or not.

    Args:
        turn: called before each step, outside its time: what is compared with the Trainer takes
            turns with it.
    """
    import transformers

    make_batch = collate_packed if "position_ids" in rows[0] else collate

    def collate_rows(part: Sequence[Row]) -> dict[str, Any]:
        return make_batch(part, pad_token_id=pad_token_id)

    arguments = transformers.TrainingArguments(**trainer_arguments(run), **_our_options())
    options = {"args": arguments, "data_collator": collate_rows}
    return _train(transformers.Trainer, model, rows, run=run, turn=turn, **options)


def trl_sft(
    model: Any,
    rows: Sequence[Row],
    *,
    run: Settings,
    tokenizer: Any,
    turn: Callable[[], Any] | None = None,
) -> list[Step]:
    """Train with `trl.SFTTrainer`, which makes batches of its own from our tokens and labels."""
    trl = require("trl")
    arguments = trl.SFTConfig(**sft_arguments(run), **_our_options())
    options = {"args": arguments, "processing_class": tokenizer}
    return _train(trl.SFTTrainer, model, rows, run=run, turn=turn, **options)


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
    turn: Callable[[], Any] | None,
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
    trainer.add_callback(_clock(steps, tokens, turn))
    with without_hub_warnings():  # a Trainer saves, too
        trainer.train()
    return steps


def _clock(steps: list[Step], tokens: Sequence[int], turn: Callable[[], Any] | None) -> Any:
    """A callback that times each step of a Trainer and appends it to `steps`."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if turn:
                turn()
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


# --- side by side ---------------------------------------------------------------------------------


def side_by_side(
    make: Callable[[], Any],
    rows: Sequence[Row],
    *,
    run: Settings,
    tokenizer: Any,
    libraries: Sequence[str] = LIBRARIES,
) -> dict[str, dict[str, Any]]:
    """The same run through our loop and each library.

    Peaks are of two steps of each alone. Then our loop and a library take turns, step by step.

    Args:
        make: gives a fresh adapted model.
    Returns name -> `losses`, `peak_bytes` and `tokens_per_second`, and for a library
    `time_ratio`: our time over its time, the median over the steps after the first.
    """
    options = {"run": run, "tokenizer": tokenizer}
    # All peaks come first: the loop of a turn keeps its model alive, which would count.
    found: dict[str, dict[str, Any]] = {}
    for name in ("ours", *libraries):
        found[name] = {"peak_bytes": _peak_bytes(name, make, rows, **options)}

    speeds: list[float] = []
    for name in libraries:
        ours, theirs = _in_turns(name, make, rows, **options)
        # The first step makes the states, and its time is not that of the others.
        pairs = zip(ours[1:], theirs[1:], strict=True)
        ratio = statistics.median(a.seconds / b.seconds for a, b in pairs)
        speeds += [step.tokens / step.seconds for step in ours[1:]]
        found["ours"]["losses"] = [step.loss for step in ours]
        found[name]["losses"] = [step.loss for step in theirs]
        found[name]["time_ratio"] = ratio

    # Our loop ran once beside each library: its speed is that of all these steps.
    speed = statistics.median(speeds)
    found["ours"]["tokens_per_second"] = speed
    for name in libraries:  # by the ratio: the machine was not equally fast in all turns
        found[name]["tokens_per_second"] = speed * found[name]["time_ratio"]
    return found


def table(found: dict[str, dict[str, Any]]) -> str:
    """What `side_by_side` found, a line each: tokens per second, peak, losses."""
    lines = []
    for name, facts in found.items():
        ratio = ""
        if "time_ratio" in facts:
            ratio = f" (ours takes {facts['time_ratio']:.2f}× its time)"
        speed = f"{facts['tokens_per_second']:,.0f} tokens/s"
        peak = f"peak {facts['peak_bytes'] / 2**20:,.0f} MiB"
        losses = " ".join(f"{loss:.4f}" for loss in facts["losses"])
        lines.append(f"{name:<11}{speed}{ratio}, {peak}, losses {losses}")
    return "\n".join(lines)


def _train_by(
    name: str,
    model: Any,
    rows: Sequence[Row],
    *,
    run: Settings,
    tokenizer: Any,
    turn: Callable[[], Any] | None = None,
) -> list[Step]:
    pad = tokenizer.pad_token_id
    if name == "ours":
        return list(training_steps(model, rows, run=run, pad_token_id=pad))
    if name == "Trainer":
        return hf_trainer(model, rows, run=run, pad_token_id=pad, turn=turn)
    return trl_sft(model, rows, run=run, tokenizer=tokenizer, turn=turn)


def _peak_bytes(
    name: str, make: Callable[[], Any], rows: Sequence[Row], *, run: Settings, tokenizer: Any
) -> int:
    """The peak of two steps: the second one has AdamW's states."""
    short = dataclasses.replace(run, steps=2, warmup_steps=min(1, run.warmup_steps))
    release_memory()  # a model of the run before would count
    model = make()  # outside of the account: adapters prove themselves when they are applied
    with PeakMemory() as memory:
        _train_by(name, model, rows, run=short, tokenizer=tokenizer)
    return memory.peak


def _in_turns(
    name: str, make: Callable[[], Any], rows: Sequence[Row], *, run: Settings, tokenizer: Any
) -> tuple[list[Step], list[Step]]:
    """Our steps and the library's: before each of its steps ours takes one, on the same rows."""
    loop = training_steps(make(), rows, run=run, pad_token_id=tokenizer.pad_token_id)
    ours: list[Step] = []

    def take_our_step() -> None:
        ours.append(next(loop))

    theirs = _train_by(name, make(), rows, run=run, tokenizer=tokenizer, turn=take_our_step)
    loop.close()  # frees our model
    return ours, theirs
