"""The same training as train.py, with what is divided said by a YAML file of accelerate.

    accelerate launch --config_file launch/accelerate/fsdp2.yaml launch/train_with_accelerate.py

The script names no strategy: `Accelerator` reads it from the environment that `accelerate launch`
has set from the file. On CPU ranks it can do DDP only:

    ACCELERATE_USE_CPU=true accelerate launch --config_file launch/accelerate/ddp.yaml \\
        --num_processes 2 launch/train_with_accelerate.py --model tiny-llama
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import guards
import text
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.elastic.multiprocessing.errors import record

from recipes_lib.core.ranks.weighted_step import counted_tokens, rank_rows


def read_options(words: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line, or of a list of its words; `--help` prints them."""
    parser = argparse.ArgumentParser(description="Train a causal language model with accelerate.")
    add = parser.add_argument
    add("--model", default="smollm2", help="smollm2, a folder, a hub id, or a shape: tiny-llama")
    add("--steps", type=int, default=10)
    add("--batch", type=int, default=8, help="rows of a step, those of all ranks together")
    add("--length", type=int, default=128, help="tokens of a row")
    add("--learning-rate", type=float, default=1e-4)
    add("--max-norm", type=float, default=1.0, help="DeepSpeed takes the one of its file")
    add("--ranks", type=int, help="how many you expect; another number is an error")
    return parser.parse_args(words)


def train(options: argparse.Namespace, accelerator: Accelerator) -> list[float]:
    """All steps of the run, on this rank. Returns their losses over the tokens of all ranks."""
    tokens = text.make_tokens(options.model)
    model = text.make_model(options.model, device=str(accelerator.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0)
    own = rank_rows(options.batch)
    say_batch_to_deepspeed(accelerator, rows=own.stop - own.start)
    # Both together: FSDP2 gives the optimizer the parameters that are left of the model.
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for step in range(options.steps):
        began = time.perf_counter()
        all_rows = text.rows_of_step(tokens, step, rows=options.batch, length=options.length)
        rows = all_rows[own]
        if step == 0:
            guards.require_rows_of_ranks(rows.to(accelerator.device), shared=False)
        loss = train_step(model, optimizer, rows.to(accelerator.device), options, accelerator)
        losses.append(loss)
        speed = all_rows.numel() / (time.perf_counter() - began)
        if accelerator.is_main_process:  # of all machines; `accelerator.print` means one of each
            print(f"step {step + 1:4d}   loss {loss:.6f}   {speed:,.0f} tokens/s", flush=True)
    return losses


def train_step(
    model: Any,
    optimizer: Any,
    rows: torch.Tensor,
    options: argparse.Namespace,
    accelerator: Accelerator,
) -> float:
    """One step on the rows [B, S] of this rank. Returns the loss over the tokens of all ranks."""
    # Gradients of ranks are averaged. The loss is a sum over the tokens of this rank, divided by
    # the mean number of tokens of a rank: then the average is that of the whole batch.
    tokens = counted_tokens(rows) / accelerator.num_processes
    loss = model(input_ids=rows, labels=rows, num_items_in_batch=tokens, use_cache=False).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), options.max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return accelerator.reduce(loss.detach().float(), reduction="mean").item()


def say_batch_to_deepspeed(accelerator: Accelerator, *, rows: int) -> None:
    """DeepSpeed wants to know the rows of a rank, which it otherwise takes from a `DataLoader`."""
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None:
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = rows


@record  # a failing rank leaves its traceback in the summary that torchrun prints
def main() -> None:
    """Read the options, refuse a start that would train something else, and train."""
    options = read_options()
    guards.require_torchrun(options.ranks)
    accelerator = Accelerator()
    guards.require_what_accelerate_promised(accelerator)
    try:
        train(options, accelerator)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
