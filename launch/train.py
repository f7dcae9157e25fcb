"""One training script for every number of ranks: torchrun starts it, --strategy says what is split.

    torchrun --standalone --nproc-per-node 2 launch/train.py --strategy fsdp --steps 10

Each process that torchrun starts is a *rank*. It runs this file from the top, with a GPU or CPU
threads of its own, and reads in its environment which rank it is.

    --strategy   a rank holds                                      a rank reads
    ddp          the whole model                                   its rows of the batch
    zero         its share of the optimizer's states; the          its rows
                 gradients with --stage 2, the weights with 3
    fsdp         its share of weights, gradients and states        its rows
    tp           its share of every layer                          all rows

A step is the same for all of them: the same rows, one loss over all tokens, one clipping of the
gradients. So the losses are the same numbers up to rounding, also with another number of ranks, and
a run that was interrupted goes on with fewer or more.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import os
import time
from pathlib import Path
from typing import Any

import guards
import text
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from recipes_lib.core.measure.machine import machine
from recipes_lib.core.ranks.agreement import agree, same_error_on_all_ranks
from recipes_lib.core.ranks.measured_bytes import rank_bytes
from recipes_lib.core.ranks.weighted_step import rank_rows, rank_step
from recipes_lib.parallel.checkpoint import (
    latest_checkpoint,
    load_checkpoint,
    require_own_store,
    save_checkpoint,
)
from recipes_lib.parallel.checkpoint.export import export_safetensors, require_new_folder
from recipes_lib.parallel.data_parallel import apply_data_parallel
from recipes_lib.parallel.fully_sharded import apply_fully_sharded
from recipes_lib.parallel.tensor_parallel import apply_tensor_parallel
from recipes_lib.parallel.zero import apply_zero

STRATEGIES = ("ddp", "zero", "fsdp", "tp")
LONGEST_WAIT = datetime.timedelta(minutes=10)  # for a rank that does not come to a collective
MIB = 2**20


def read_options(words: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line, or of a list of its words; `--help` prints them."""
    parser = argparse.ArgumentParser(description="Train a causal language model on many ranks.")
    add = parser.add_argument
    add("--strategy", choices=STRATEGIES, default="ddp", help="what the ranks divide")
    add("--stage", type=int, choices=(1, 2, 3), default=1, help="of ZeRO")
    add("--model", default="smollm2", help="smollm2, a folder, a hub id, or a shape: tiny-llama")
    add("--data", help="a file of pairs or texts, in place of the standard library")
    add("--steps", type=int, default=10, help="of the whole run")
    add("--batch", type=int, default=8, help="rows of a step, those of all ranks together")
    add("--length", type=int, default=128, help="tokens of a row")
    add("--learning-rate", type=float, default=1e-4)
    add("--max-norm", type=float, default=1.0, help="of the gradients of all ranks together")
    add("--bf16", action="store_true", help="compute in bf16; weights and states stay fp32")
    add("--device", choices=("cpu", "cuda"), default=machine().device)
    add("--checkpoints", type=Path, help="a folder that all machines share; a run goes on from it")
    add("--save-every", type=int, default=100, help="steps")
    add("--export", type=Path, help="a new folder for the trained model, for `from_pretrained`")
    add("--ranks", type=int, help="how many you expect; another number is an error")
    return parser.parse_args(words)


# --- the ranks ------------------------------------------------------------------------------------


def join_the_ranks(device_type: str) -> torch.device:
    """Wait until all ranks are there, and return the device of this one."""
    if device_type == "cpu":
        dist.init_process_group("gloo", timeout=LONGEST_WAIT)
        return torch.device("cpu")
    # Chosen before anything is stored: otherwise every rank also takes memory of GPU 0.
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=LONGEST_WAIT)
    return device


# --- what the ranks divide ------------------------------------------------------------------------


def split_model(model: Any, options: argparse.Namespace) -> tuple[Any, torch.optim.Optimizer]:
    """The model and its optimizer, divided among the ranks as `--strategy` says."""
    adamw = {"lr": options.learning_rate, "weight_decay": 0.0}
    if options.strategy == "zero":
        return apply_zero(model, torch.optim.AdamW, stage=options.stage, **adamw)
    if options.strategy == "ddp":
        model = apply_data_parallel(model)
    elif options.strategy == "tp":
        model = apply_tensor_parallel(model)
    elif options.bf16:
        model = apply_fully_sharded(model, parameter_dtype=torch.bfloat16)
    else:
        model = apply_fully_sharded(model)
    # After the model was divided: the optimizer has to hold the parameters that are left of it.
    return model, torch.optim.AdamW(model.parameters(), **adamw)


def own_rows(rows: torch.Tensor, strategy: str) -> torch.Tensor:
    """What this rank reads of the rows [B, S] of a step: its share, or all of them."""
    if strategy == "tp":
        return rows
    return rows[rank_rows(len(rows))]


# --- a step ---------------------------------------------------------------------------------------


def train_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    ids: torch.Tensor,
    options: argparse.Namespace,
) -> float:
    """One step on the token ids [B, S] of this rank. Returns the loss over those of all ranks."""
    return rank_step(
        model,
        optimizer,
        [{"input_ids": ids, "labels": ids}],
        max_norm=options.max_norm,
        loss_sum=functools.partial(loss_sum, options=options),
    )


def loss_sum(model: Any, batch: dict[str, torch.Tensor], options: argparse.Namespace) -> Any:
    """The sum of the losses of this rank's tokens, by the model's own loss.

    Under `tp` each rank has the logits of a part of the vocabulary, and the model knows it.
    """
    with compute_precision(options):
        return model(**batch, num_items_in_batch=1, use_cache=False).loss


def compute_precision(options: argparse.Namespace) -> contextlib.AbstractContextManager:
    """Autocast to bf16 with `--bf16`. Under `fsdp` the sharded weights are gathered in bf16."""
    if options.bf16 and options.strategy != "fsdp":
        return torch.autocast(options.device, dtype=torch.bfloat16)
    return contextlib.nullcontext()


# --- the run --------------------------------------------------------------------------------------


def train(options: argparse.Namespace, device: torch.device) -> list[float]:
    """All steps of the run, on this rank. Returns their losses over the tokens of all ranks."""
    agree(**vars(options))
    if options.export is not None:
        with same_error_on_all_ranks():
            require_new_folder(options.export)  # now, and not after days of training
    tokens = text.make_tokens(options.model, options.data)
    model = text.make_model(options.model, device=str(device))
    model, optimizer = split_model(model, options)
    first = go_on(model, optimizer, options)
    losses = []
    for step in range(first, options.steps):
        began = time.perf_counter()
        all_rows = text.rows_of_step(tokens, step, rows=options.batch, length=options.length)
        rows = own_rows(all_rows, options.strategy)
        if step == first:
            guards.require_rows_of_ranks(rows, shared=options.strategy == "tp")
        loss = train_step(model, optimizer, rows.to(device), options)
        losses.append(loss)
        seconds = time.perf_counter() - began
        say(f"step {step + 1:4d}   loss {loss:.6f}   {all_rows.numel() / seconds:,.0f} tokens/s")
        save_if_due(model, optimizer, options, done=step + 1)
    say_bytes(model, optimizer)
    export_if_asked(model, options)
    return losses


def go_on(model: Any, optimizer: torch.optim.Optimizer, options: argparse.Namespace) -> int:
    """Load the last checkpoint if there is one. Returns the number of steps that are done."""
    folder = options.checkpoints
    if folder is None:
        return 0
    guards.require_shared_folder(folder)
    if latest_checkpoint(folder) is None:
        return 0
    done = load_checkpoint(folder, model=model, optimizer=optimizer, run=facts_of(options))
    say(f"going on after step {done} of {folder}")
    return done


def save_if_due(
    model: Any, optimizer: torch.optim.Optimizer, options: argparse.Namespace, *, done: int
) -> None:
    """Write a checkpoint after every `--save-every` steps, and after the last one."""
    if options.checkpoints is None:
        return
    if done % options.save_every == 0 or done == options.steps:
        facts = facts_of(options)
        save_checkpoint(options.checkpoints, step=done, model=model, optimizer=optimizer, run=facts)


def export_if_asked(model: Any, options: argparse.Namespace) -> None:
    """Write the model, and its tokenizer if it has one, as programs of one process read them."""
    if options.export is None:
        return
    export_safetensors(options.export, model=model)
    if dist.get_rank() == 0:
        text.save_tokenizer(options.model, options.export)
    say(f"the model is in {options.export}")


def facts_of(options: argparse.Namespace) -> dict[str, Any]:
    """What a run that goes on has to share with the one that was interrupted: the data of a step.

    The strategy and the number of ranks may be others.
    """
    return {name: getattr(options, name) for name in ("model", "data", "batch", "length")}


def say(line: str) -> None:
    """Print once, not once for each rank."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def say_bytes(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """What rank 0 holds after the last step."""
    held = rank_bytes(model, optimizer)
    say(
        f"rank 0 of {dist.get_world_size()} holds {held.parameters / MIB:,.1f} MiB of weights and "
        f"{held.states / MIB:,.1f} MiB of optimizer states"
    )


@record  # a failing rank leaves its traceback in the summary that torchrun prints
def main() -> None:
    """Read the options, refuse a start that would train something else, and train."""
    options = read_options()
    guards.refuse_settings_of_accelerate()
    guards.require_torchrun(options.ranks)
    require_own_store()
    device = join_the_ranks(options.device)
    try:
        train(options, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
