"""Fine-tune a pretrained model: the techniques of notebook 05 put together in one loop."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from recipes_lib.core.data import Batch, collate
from recipes_lib.core.data.row_order import rows_of_step
from recipes_lib.core.data.tokens_and_labels import Row
from recipes_lib.core.measure.machine import synchronize
from recipes_lib.core.model.loss import count_targets
from recipes_lib.core.ranks import rank, world_size
from recipes_lib.core.ranks.collectives import sums_over_ranks
from recipes_lib.core.ranks.weighted_step import rank_rows
from recipes_lib.fine_tuning.completion_only_loss import completion_only_loss
from recipes_lib.fine_tuning.lora import apply_lora
from recipes_lib.fine_tuning.qlora import apply_qlora
from recipes_lib.memory.activation_checkpointing import apply_activation_checkpointing
from recipes_lib.parallel import checkpoint as in_parts
from recipes_lib.parallel.data_parallel import averaged_by_hand
from recipes_lib.precision.eight_bit_adam import eight_bit_adamw
from recipes_lib.precision.mixed_precision import MixedPrecision, mixed_precision
from recipes_lib.training.exact_resume import load_checkpoint, save_checkpoint
from recipes_lib.training.gradient_accumulation import accumulate_gradients
from recipes_lib.training.sequence_packing import collate_packed
from recipes_lib.workflows.finetune.checkpoints import (
    CHECKPOINT,
    CHECKPOINTS,
    checkpoint_of,
    facts_in_checkpoint,
    facts_of_run,
    keeps_checkpoint,
)
from recipes_lib.workflows.finetune.settings import PRECISIONS, Settings
from recipes_lib.workflows.finetune.shards import at_rest


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of the loop, as it went."""

    number: int
    loss: float  # nats per target
    gradient_norm: float  # before clipping
    learning_rate: float
    seconds: float
    tokens: int  # of text, without padding
    updated: bool = True  # False where gradients overflowed in fp16: nothing changed


# --- the loop -------------------------------------------------------------------------------------


def training_steps(
    model: Any,
    rows: Sequence[Row],
    *,
    run: Settings,
    pad_token_id: int,
    folder: Path | None = None,
    resume: bool = False,
    base: str = "",
) -> Iterator[Step]:
    """Fine-tune step by step, as `run` says.

    Clipping and the schedule count optimizer steps, whatever the number of micro-batches. Rows
    that are packed (they have `position_ids`) are trained as such.

    Args:
        folder: keep a checkpoint there every `run.save_steps` steps.
        resume: go on from the checkpoint in `folder`, if there is one.
        base: fingerprint of the base model; a resumed run must have the same.
    """
    if run.shard:
        at_rest(model)  # the optimizer is given parts
    optimizer, schedule, precision = optimizer_of(model, run=run)
    # All that the next step reads: without one of these a resumed run would be another run.
    state = {
        "model": model,
        "optimizer": optimizer,
        "run": facts_of_run(run, rows, base),
        "parts": {"schedule": schedule, "precision": precision},
    }
    done = 0
    if folder and resume and checkpoint_of(run, folder).exists():
        steps = facts_in_checkpoint(run, folder)["steps"]
        of_shorter_run = state | {"run": state["run"] | {"steps": steps}}
        if run.shard:
            done = in_parts.load_checkpoint(folder / CHECKPOINTS, **of_shorter_run)
        else:
            done = load_checkpoint(folder / CHECKPOINT, **of_shorter_run)
        if steps != run.steps:
            # The rate of the next step is that of the longer schedule, and not the old one's end.
            schedule.last_epoch -= 1
            schedule.step()

    for number in range(done, run.steps):
        start = time.perf_counter()
        chosen = rows_of_step(
            number, rows=len(rows), rows_per_step=run.rows_per_step, seed=run.seed
        )
        of_all_ranks = [rows[place] for place in chosen]
        own = of_all_ranks[rank_rows(len(chosen))]  # all of them in a process that is alone
        micros = micro_batches(own, run=run, pad_token_id=pad_token_id, device=str(model.device))
        loss, norm, rate, updated = _optimizer_step(
            model, micros, optimizer, schedule, precision, run=run
        )
        synchronize()
        seconds = time.perf_counter() - start
        tokens = sum(len(row["input_ids"]) for row in of_all_ranks)
        yield Step(number, loss.item(), float(norm), rate, seconds, tokens, updated)

        # Who takes the steps has logged this one by now: a kill leaves no gap in the log.
        if not folder or not keeps_checkpoint(number, run=run):
            continue
        if run.shard:
            in_parts.save_checkpoint(folder / CHECKPOINTS, step=number + 1, keep=1, **state)
        elif rank() == 0:
            save_checkpoint(folder / CHECKPOINT, step=number + 1, **state)


def _optimizer_step(
    model: Any,
    micros: Sequence[Batch],
    optimizer: torch.optim.Optimizer,
    schedule: Any,
    precision: MixedPrecision,
    *,
    run: Settings,
) -> tuple[torch.Tensor, Any, float, bool]:
    """A step of the loop: forward and backward of all micro-batches, then one update.

    Returns the loss, the norm of the gradients before clipping, the learning rate, and whether
    anything changed.
    """
    # The base may be in 16 bits although the run is in fp32: then loss scaling alone is used.
    autocast = precision.autocast if run.precision != "fp32" else contextlib.nullcontext
    limit = run.max_grad_norm if run.max_grad_norm > 0 else float("inf")  # 0: no clipping

    options = {"autocast": autocast, "backward": precision.backward}
    if world_size() == 1:
        loss = accumulate_gradients(model, micros, loss_sum=completion_only_loss, **options)
    else:
        loss = _gradients_of_all_ranks(model, micros, run=run, **options)
    rate = schedule.get_last_lr()[0]  # before the schedule moves on
    updated = precision.step(optimizer, max_grad_norm=limit)
    if updated:  # not where gradients overflowed in fp16: there the rate stays
        schedule.step()
    optimizer.zero_grad()
    norm = precision.gradient_norm
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    return loss, norm, rate, updated


def _gradients_of_all_ranks(
    model: Any, micros: Sequence[Batch], *, run: Settings, **options: Any
) -> torch.Tensor:
    """A step of the loop where each rank has some rows: every target of all weighs the same."""
    own = sum(int(count_targets(micro["labels"])) for micro in micros)
    (of_all,) = sums_over_ranks(own)
    weight = own * world_size() / of_all  # the average over ranks, and not over their targets

    def weighted_loss_sum(model: Any, batch: Batch) -> torch.Tensor:
        return weight * completion_only_loss(model, batch)

    loss = accumulate_gradients(model, micros, loss_sum=weighted_loss_sum, **options)
    if not run.shard:  # there each backward has averaged them already
        averaged_by_hand(model)
    (total,) = sums_over_ranks(loss.item())
    return torch.tensor(total / world_size())


def micro_batches(
    rows: Sequence[Row], *, run: Settings, pad_token_id: int, device: str
) -> list[Batch]:
    """The rows of one step of the loop, `run.micro_batch_size` at a time."""
    make_batch = collate_packed if "position_ids" in rows[0] else collate
    batches = []
    for start in range(0, len(rows), run.micro_batch_size):
        part = rows[start : start + run.micro_batch_size]
        batches.append(make_batch(part, pad_token_id=pad_token_id, device=device))
    return batches


# --- what the loop is made of ---------------------------------------------------------------------


def adapt(model: Any, *, run: Settings) -> Any:
    """What the loop trains: full, LoRA or QLoRA, with or without checkpointing, as `run` says."""
    if run.method != "full":
        apply = apply_qlora if run.method == "qlora" else apply_lora
        model = apply(model, rank=run.rank, alpha=run.alpha, dropout=run.dropout)
    if run.gradient_checkpointing:
        model = apply_activation_checkpointing(model)
    return model


def optimizer_of(model: Any, *, run: Settings) -> tuple[torch.optim.Optimizer, Any, MixedPrecision]:
    """The loop's optimizer, schedule (warm-up, cosine to zero) and precision, as `run` says."""
    from transformers import get_cosine_schedule_with_warmup

    if "8bit" in run.optimizer:
        paged = run.optimizer.startswith("paged")
        optimizer = eight_bit_adamw(model, lr=run.learning_rate, paged=paged)
    else:
        trainable = [p for p in model.parameters() if p.requires_grad]
        fused = run.optimizer.endswith("fused")
        optimizer = torch.optim.AdamW(trainable, lr=run.learning_rate, fused=fused)
    schedule = get_cosine_schedule_with_warmup(optimizer, run.warmup_steps, run.steps)

    # Gradients pass through a frozen fp16 base in fp16: they need loss scaling, whatever the
    # adapters are.
    dtype = PRECISIONS[run.precision]
    if model.dtype is torch.float16:
        dtype = torch.float16
    return optimizer, schedule, mixed_precision(dtype=dtype)
