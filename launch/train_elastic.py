"""A training that goes on when a rank dies, small enough to be copied.

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 2 \\
        --max-restarts 3 launch/train_elastic.py --folder runs/elastic --die-at 7

The last rank kills itself in step 7. torchrun notices, ends the others, and
starts all ranks again. They go on after the last checkpoint, with the rows that come next, and the
losses are those of a run that nobody has killed. Four things make it so:

    1  The rows of a step are a function of its number.
    2  A checkpoint is whole, or LATEST does not name it.
    3  Every attempt begins by looking for the last checkpoint.
    4  Ranks of a new attempt do not meet those of an old one (`require_own_store`).

`train.py` does the same with more strategies.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import text
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard

from recipes_lib.core.measure.machine import machine
from recipes_lib.core.ranks import rank, world_size
from recipes_lib.core.ranks.collectives import sums_over_ranks
from recipes_lib.parallel.checkpoint import (
    latest_checkpoint,
    load_checkpoint,
    require_own_store,
    save_checkpoint,
)
from recipes_lib.training.data_loading import step_loader, to_device


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line; `--help` prints them."""
    parser = argparse.ArgumentParser(description="Train, and go on when a rank dies.")
    add = parser.add_argument
    add("--folder", type=Path, required=True, help="of checkpoints, shared by all machines")
    add("--model", default="tiny-llama", help="a shape, smollm2, a folder or a hub id")
    add("--steps", type=int, default=12, help="of the whole run")
    add("--rows", type=int, default=8, help="of a step, those of all ranks together")
    add("--length", type=int, default=64, help="tokens of a row")
    add("--learning-rate", type=float, default=1e-3)
    add("--save-every", type=int, default=4, help="steps")
    add("--workers", type=int, default=0, help="processes of each rank that make batches")
    add("--device", choices=("cpu", "cuda"), default=machine().device)
    add("--die-at", type=int, help="the step in which the last rank kills itself, once")
    options = parser.parse_args(arguments)
    if options.die_at is not None and options.die_at < options.save_every:
        parser.error("--die-at comes after the first checkpoint, see --save-every, or never ends")
    return options


def join_the_ranks(device_type: str) -> torch.device:
    """Meet the other ranks. Started without torchrun, this process stays alone."""
    device = torch.device(device_type)
    if "RANK" not in os.environ:
        return device
    require_own_store()
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    return device


def make_model(options: argparse.Namespace, device: torch.device) -> Any:
    """The model, divided among the ranks if there are several."""
    model = text.make_model(options.model, device=str(device))
    if world_size() > 1:
        for block in model.model.layers:
            fully_shard(block)
        fully_shard(model)
    return model


def make_rows(options: argparse.Namespace) -> list[torch.Tensor]:
    """The text, cut into rows of equal length."""
    tokens = text.make_tokens(options.model)
    whole = len(tokens) // options.length * options.length
    return list(tokens[:whole].view(-1, options.length))


def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """A batch [B, S] of rows [S]. All tokens but the first of a row are predicted."""
    input_ids = torch.stack(rows)
    return {"input_ids": input_ids, "labels": input_ids}


def train(options: argparse.Namespace, device: torch.device) -> None:
    """All steps that are left of the run, on this rank."""
    model = make_model(options, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    names = ("model", "rows", "length", "learning_rate")
    facts = {name: getattr(options, name) for name in names}
    state = {"model": model, "optimizer": optimizer, "run": facts}

    first = 0
    if latest_checkpoint(options.folder) is not None:
        first = load_checkpoint(options.folder, **state)
    say(options, {"first": first, "hosts": hosts()})

    loader = step_loader(
        make_rows(options),
        rows_per_step=options.rows,
        start=first,  # the position in the data is the step: nothing else is restored
        steps=options.steps,
        collate=collate,
        workers=options.workers,
    )
    for step, batch in enumerate(to_device(loader, device), first):
        loss = model(**batch, use_cache=False).loss
        loss.backward()  # FSDP averages the gradients; all rows are equally long
        if step == options.die_at and first == 0:  # once: not when it goes on
            kill_the_last_rank()
        optimizer.step()
        optimizer.zero_grad()
        [total] = sums_over_ranks(loss.item())
        say(options, {"step": step, "loss": total / world_size()})
        if (step + 1) % options.save_every == 0:
            # save_checkpoint_async(..., after=pending) does not let the training wait.
            save_checkpoint(options.folder, step=step + 1, **state)


def kill_the_last_rank() -> None:
    """What a failing machine or an impatient system does to a process."""
    if rank() == world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)


def hosts() -> list[str]:
    """The names of the machines of all ranks."""
    names: list[Any] = [socket.gethostname()]
    if dist.is_initialized():
        names = [None] * world_size()
        dist.all_gather_object(names, socket.gethostname())
    return names


def say(options: argparse.Namespace, line: dict[str, Any]) -> None:
    """Print what happens, and keep it in a file: on rank 0 only."""
    if rank() > 0:
        return
    print(json.dumps(line), flush=True)
    options.folder.mkdir(parents=True, exist_ok=True)
    with (options.folder / "log.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


@record  # a failing rank leaves its traceback in the summary that torchrun prints
def main() -> None:
    """Read the options, meet the other ranks, and train."""
    options = read_options()
    device = join_the_ranks(options.device)
    train(options, device)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
