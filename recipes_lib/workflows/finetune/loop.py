"""Fine-tune a pretrained model: the techniques of notebook 05 put together in one loop, with its arithmetic.

    model, plan = prepare(load_model(), rows, run=settings, pad_token_id=0)  # plan: the predicted peak of a step
    for step in training_steps(model, rows, run=settings, pad_token_id=0):
        print(step.loss)

`finetune_command.py` makes it a command, and `production.py` runs the same settings through the libraries.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from recipes_lib.core.budget import Budget
from recipes_lib.core.causal_lm import decoder_blocks
from recipes_lib.core.data import IGNORED, collate
from recipes_lib.core.machine import machine, synchronize
from recipes_lib.fine_tuning.completion_only_loss import completion_only_loss
from recipes_lib.fine_tuning.lora import apply_lora
from recipes_lib.fine_tuning.qlora import apply_qlora
from recipes_lib.memory.activation_checkpointing import apply_activation_checkpointing
from recipes_lib.precision.eight_bit_adam import eight_bit_adamw
from recipes_lib.precision.mixed_precision import MixedPrecision, mixed_precision
from recipes_lib.training.exact_resume import load_checkpoint, rows_of_step, save_checkpoint
from recipes_lib.training.gradient_accumulation import accumulate_gradients
from recipes_lib.training.sequence_packing import collate_packed
from recipes_lib.workflows.finetune.budget import (
    PRECISIONS,
    Batch,
    estimate_adapters,
    estimate_finetune,
)
from recipes_lib.workflows.finetune.settings import Settings

Row = dict[str, list[int]]
CHECKPOINT = "checkpoint.pt"
FREE = {
    "base_model",
    "data_file",
    "output_dir",
    "save_steps",
    "report_to",
}  # settings that a resumed run may change


@dataclasses.dataclass(frozen=True)
class Step:
    """One optimizer step: loss in nats per target, `seconds` of which `loading` made the batch, `tokens` of text."""

    number: int
    loss: float
    gradient_norm: float
    learning_rate: float
    seconds: float
    loading: float
    tokens: int


def training_steps(model: Any, rows: Sequence[Row], *, run: Settings, pad_token_id: int, folder: Path | None = None,
                   resume: bool = False, base: str = "") -> Iterator[Step]:  # fmt: skip
    """Train step by step, as `run` says; with a `folder`, keep a checkpoint there every `run.save_steps` steps.

    Clipping and the schedule count optimizer steps, whatever the number of micro-batches. Rows that are packed (they
    have `position_ids`) are trained as such. Raises ValueError as `check_run` does, at the first step.
    """
    check_run(rows, run=run, folder=folder, resume=resume)
    optimizer, schedule, mp = optimizer_of(model, run=run)
    parts, facts, done = {"schedule": schedule, "precision": mp}, facts_of(run, rows, base), 0
    autocast = contextlib.nullcontext if run.precision == "fp32" else mp.autocast
    if folder and resume and (folder / CHECKPOINT).exists():
        done = load_checkpoint(
            folder / CHECKPOINT, model=model, optimizer=optimizer, run=facts, parts=parts
        )
    for number in range(done, run.steps):
        start = time.perf_counter()
        chosen = rows_of_step(
            number, rows=len(rows), rows_per_step=run.rows_per_step, seed=run.seed
        )
        micros = micro_batches(
            [rows[i] for i in chosen], run=run, pad_token_id=pad_token_id, device=str(model.device)
        )
        loading = time.perf_counter() - start
        options = {"loss_sum": completion_only_loss, "autocast": autocast, "backward": mp.backward}
        loss = accumulate_gradients(model, micros, **options)
        rate = schedule.get_last_lr()[0]
        if mp.step(
            optimizer, max_grad_norm=run.max_grad_norm or float("inf")
        ):  # False: fp16 gradients overflowed
            schedule.step()
        optimizer.zero_grad()
        synchronize()
        seconds = time.perf_counter() - start
        tokens = sum(len(rows[i]["input_ids"]) for i in chosen)
        yield Step(number, loss.item(), float(mp.gradient_norm), rate, seconds, loading, tokens)
        # Who takes the steps has logged this one by now: after a kill no step is missing in the log.
        if folder and keeps_checkpoint(number, run=run):
            state = {"model": model, "optimizer": optimizer, "run": facts, "parts": parts}
            save_checkpoint(folder / CHECKPOINT, step=number + 1, **state)


def keeps_checkpoint(number: int, *, run: Settings) -> bool:
    """Whether a checkpoint follows optimizer step `number`, from 0."""
    return number + 1 == run.steps or (number + 1) % (run.save_steps or run.steps) == 0


def optimizer_of(model: Any, *, run: Settings) -> tuple[torch.optim.Optimizer, Any, MixedPrecision]:
    """Optimizer, its schedule (linear warm-up, cosine to zero) and the precision of the loop, as `run` says."""
    from transformers import get_cosine_schedule_with_warmup

    options = {
        "lr": run.learning_rate,
        "betas": run.betas,
        "eps": run.eps,
        "weight_decay": run.weight_decay,
    }
    if "8bit" in run.optimizer:
        optimizer = eight_bit_adamw(model, paged=run.optimizer.startswith("paged"), **options)
    else:
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trainable, fused=run.optimizer.endswith("fused"), **options)
    schedule = get_cosine_schedule_with_warmup(optimizer, run.warmup_steps, run.steps)
    # Gradients pass through a frozen fp16 base in fp16: they need loss scaling, whatever the adapters are.
    dtype = torch.float16 if model.dtype is torch.float16 else PRECISIONS[run.precision]
    return optimizer, schedule, mixed_precision(dtype=dtype)


def micro_batches(
    rows: Sequence[Row], *, run: Settings, pad_token_id: int, device: str
) -> list[Batch]:
    """The rows of one optimizer step in micro-batches of `run.micro_batch_size`, each as long as its longest row."""
    together = collate_packed if "position_ids" in rows[0] else collate
    starts = range(0, len(rows), run.micro_batch_size)
    parts = [rows[start : start + run.micro_batch_size] for start in starts]
    return [together(part, pad_token_id=pad_token_id, device=device) for part in parts]


def check_run(rows: Sequence[Row], *, run: Settings, folder: Path | None, resume: bool) -> None:
    """Everything that can be refused before any compute: ValueError for no rows, too few, too long, without targets,
    a folder that holds another run's checkpoint, and a paged optimizer on a CPU."""
    if run.optimizer.startswith("paged") and machine().device == "cpu":
        raise ValueError(
            f"optimizer={run.optimizer!r} moves states to the host, and this machine has no GPU: choose another"
        )
    if not len(rows):
        raise ValueError("the data set is empty: give rows with input_ids and labels")
    if len(rows) < run.rows_per_step:
        raise ValueError(
            f"{len(rows)} rows are fewer than rows_per_step={run.rows_per_step}: give more, or lower it"
        )
    long = [i for i, row in enumerate(rows) if len(row["input_ids"]) > run.seq_len]
    if long:
        raise ValueError(
            f"{len(long)} of {len(rows)} rows are longer than seq_len={run.seq_len} (row {long[0]}: "
            f"{len(rows[long[0]]['input_ids'])} tokens): raise seq_len or leave them out; cut answers teach to stop"
        )
    masked = next(
        (
            i
            for i, row in enumerate(rows)
            if not any(label != IGNORED for label in row["labels"][1:])
        ),
        None,
    )
    if masked is not None:
        raise ValueError(
            f"row {masked} has no target, every label is {IGNORED}: leave it out or unmask its answer"
        )
    if folder and (folder / CHECKPOINT).exists() and not resume:
        raise ValueError(
            f"{folder} holds the checkpoint of a run: resume it, or choose another folder"
        )


def facts_of(run: Settings, rows: Sequence[Row], base: str) -> dict[str, Any]:
    """What a resumed run must share: the settings that change the training, the data, the base model."""
    facts = {name: value for name, value in dataclasses.asdict(run).items() if name not in FREE}
    content = hashlib.sha256()
    for row in rows:
        content.update(json.dumps([row["input_ids"], row["labels"]]).encode())
    facts["betas"], facts["target_modules"] = (
        list(run.betas),
        run.target_modules and list(run.target_modules),
    )
    return facts | {"data": content.hexdigest()[:16], "base": base, "device": machine().device}


def adapt(model: Any, *, run: Settings) -> Any:
    """Full fine-tuning, LoRA or QLoRA, with or without checkpointing, as `run` says."""
    if run.method != "full":
        options = {"rank": run.rank, "alpha": run.alpha, "dropout": run.dropout}
        targets = run.target_modules or "all-linear"
        model = (apply_qlora if run.method == "qlora" else apply_lora)(
            model, target_modules=targets, **options
        )
    return apply_activation_checkpointing(model) if run.gradient_checkpointing else model


def loading_share(steps: Sequence[Step]) -> float:
    """The part of the time that went into making batches."""
    return sum(step.loading for step in steps) / sum(step.seconds for step in steps)


def few_steps(
    model: Any,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    autocast: Any = contextlib.nullcontext,
) -> tuple[list[float], float, float]:
    """Three steps of any optimizer on one batch: the losses, the seconds of the last one (the first makes the
    states), and the share of the last block's weights that changed."""

    def step() -> float:
        loss = accumulate_gradients(
            model, [batch], loss_sum=completion_only_loss, autocast=autocast
        )
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    watched = list(decoder_blocks(model)[-1].parameters())
    old = [parameter.detach().clone() for parameter in watched]
    losses = [step(), step()]
    synchronize()
    start = time.perf_counter()
    losses.append(step())
    synchronize()
    seconds = time.perf_counter() - start
    changed = sum((a != b).sum().item() for a, b in zip(old, watched, strict=True))
    return losses, seconds, changed / sum(parameter.numel() for parameter in old)


def prepare(
    model: Any, rows: Sequence[Row], *, run: Settings, pad_token_id: int, number: int = 2
) -> tuple[Any, Budget]:
    """`adapt` the base `model`, and predict the budget of optimizer step `number`, from 0 (AdamW has its states)."""
    chosen = rows_of_step(number, rows=len(rows), rows_per_step=run.rows_per_step, seed=run.seed)
    micros = micro_batches(
        [rows[i] for i in chosen], run=run, pad_token_id=pad_token_id, device=str(model.device)
    )
    plans = estimate_adapters(model, micros, run=run)
    model = adapt(model, run=run)
    return model, estimate_finetune(plans, model, micros, run=run)
