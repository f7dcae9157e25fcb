"""`python -m recipes_lib finetune`: adapt a pretrained model to pairs of your own.

An option is named as people say it, `--model`, and its parameter as the field of `Settings` that it
fills, `base_model`: so the options become settings by their names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from recipes_lib.workflows.finetune.settings import Settings

# The headings under which --help lists the options.
DATA = "What is trained on"
WEIGHTS = "What is trained"
TRAINING = "How it is trained"
OUTPUT = "What is kept"

AUTO = "auto"  # --seq-len: as long as the longest row
REPLACED = 1  # tokens, until the rows are read
STEPS = 100
LONGEST_WAIT = datetime.timedelta(hours=2)  # of the command's ranks for each other


def _option(panel: str, text: str, *names: str) -> Any:
    """An option under the heading `panel`; `names` where they are not those of the parameter."""
    return typer.Option(*names, help=text, rich_help_panel=panel)


PAIRS = (
    "JSON Lines, JSON, CSV, Parquet, TXT or a hub id, with prompt and completion, messages, or "
    "text; may be given several times; else docstrings"
)
TEMPLATE = "chatml, or a file of Jinja, in place of the tokenizer's own"
ADDED = "a token that the base has no trained row for; may be given several times"
LENGTH = "tokens of the longest row, and of a packed one; auto: what the data needs"
WARMUP = "of the learning rate, which then falls to 0 in a cosine; none if --steps is not more"
RATE = "else 3e-4 for adapters, 1e-4 for the full model"
SHARD = "divide the model over the ranks of torchrun; else where one device cannot hold it"
PLACE = "folder for adapter, checkpoint, log and configurations"

Method = Literal["lora", "qlora", "full"]
Precision = Literal["fp32", "bf16", "fp16"]
Report = Literal["none", "tensorboard", "mlflow", "wandb"]


def finetune(
    context: typer.Context,
    output_dir: Annotated[str, _option(OUTPUT, PLACE, "--output")],
    base_model: Annotated[str, _option(WEIGHTS, "hub id or folder", "--model")] = "smollm2",
    data_files: Annotated[list[str] | None, _option(DATA, PAIRS, "--data")] = None,
    held_out: Annotated[
        str | None, _option(DATA, "held-out pairs; else every tenth pair of --data")
    ] = None,
    limit: Annotated[int | None, _option(DATA, "use the first pairs only, to try a run")] = None,
    prompt_column: Annotated[str, _option(DATA, "its name in the data, if it is another")] = "",
    completion_column: Annotated[str, _option(DATA, "the same of the completion")] = "",
    seq_len: Annotated[str, _option(DATA, LENGTH)] = "256",
    drop_long: Annotated[
        bool, _option(DATA, "leave out rows beyond --seq-len", "--drop-long")
    ] = False,
    no_packing: Annotated[
        bool, _option(DATA, "pad each micro-batch instead", "--no-packing")
    ] = False,
    chat_template: Annotated[str, _option(DATA, TEMPLATE)] = "",
    add_tokens: Annotated[list[str] | None, _option(WEIGHTS, ADDED, "--add-token")] = None,
    method: Annotated[Method, _option(WEIGHTS, "all weights, or adapters")] = "lora",
    rank: Annotated[int, _option(WEIGHTS, "of the adapters")] = 16,
    alpha: Annotated[
        float, _option(WEIGHTS, "the adapters' correction is scaled by alpha / rank")
    ] = 32,
    dropout: Annotated[float, _option(WEIGHTS, "of what the adapters read")] = 0.0,
    learning_rate: Annotated[float | None, _option(TRAINING, RATE)] = None,
    optimizer: Annotated[
        str, _option(TRAINING, "or adamw_bnb_8bit, paged_adamw_8bit")
    ] = "adamw_torch_fused",
    max_grad_norm: Annotated[float, _option(TRAINING, "clip gradients to it; 0: not at all")] = 1.0,
    steps: Annotated[int | None, _option(TRAINING, "optimizer steps; else 100")] = None,
    epochs: Annotated[
        int | None, _option(TRAINING, "passes over the data, in place of --steps")
    ] = None,
    warmup_steps: Annotated[int, _option(TRAINING, WARMUP)] = 5,
    rows_per_step: Annotated[
        int, _option(TRAINING, "rows, or packed rows, of one optimizer step")
    ] = 8,
    micro_batch_size: Annotated[int, _option(TRAINING, "rows in memory at a time")] = 1,
    precision: Annotated[
        Precision | None, _option(TRAINING, "else the fastest of this machine")
    ] = None,
    gradient_checkpointing: Annotated[
        bool, _option(TRAINING, "less memory, more time", "--gradient-checkpointing")
    ] = False,
    shard: Annotated[bool | None, _option(TRAINING, SHARD, "--shard/--no-shard")] = None,
    seed: Annotated[int, _option(TRAINING, "of the order of the rows and of the adapters")] = 0,
    resume: Annotated[
        bool,
        _option(OUTPUT, "go on from the checkpoint in --output; to more --steps, too", "--resume"),
    ] = False,
    save_steps: Annotated[int, _option(OUTPUT, "steps between checkpoints")] = 10,
    report_to: Annotated[Report, _option(OUTPUT, "kind of the log")] = "tensorboard",
) -> None:
    """Adapt a pretrained model to pairs of your own."""
    from recipes_lib.core.measure.machine import machine
    from recipes_lib.workflows.finetune import command

    named = {"prompt": prompt_column, "completion": completion_column}
    with _ranks_of_torchrun():
        run = _settings(context.params)
        print(machine())
        command.finetune(
            run,
            held_out_file=None if held_out is None else _without_tilde(held_out),
            limit=limit,
            longest=seq_len == AUTO,
            drop_long=drop_long,
            resume=resume,
            epochs=epochs,
            columns={known: name for known, name in named.items() if name},
        )


@contextlib.contextmanager
def _ranks_of_torchrun() -> Iterator[None]:
    """For the command: meet the other processes of torchrun, if there are. The first one speaks."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    import torch
    from torch import distributed

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # On GPUs, too, what stays in host memory is sent: by gloo.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    # The first rank loads a large base, and quantizes it, while the others wait.
    distributed.init_process_group(backend, timeout=LONGEST_WAIT)
    with contextlib.ExitStack() as quiet:
        if distributed.get_rank() > 0:
            nowhere = quiet.enter_context(open(os.devnull, "w"))
            quiet.enter_context(contextlib.redirect_stdout(nowhere))
        yield
        distributed.barrier()  # the first one still saves
    distributed.destroy_process_group()


def _settings(options: dict[str, Any]) -> Settings:
    """What the options of `finetune` say; else the values of this machine and method."""
    import torch

    from recipes_lib.core.measure.machine import machine
    from recipes_lib.core.ranks import world_size
    from recipes_lib.workflows.finetune.settings import Settings

    fields = {field.name for field in dataclasses.fields(Settings)}
    settings = {name: value for name, value in options.items() if name in fields}
    if options["steps"] is not None and options["epochs"] is not None:
        raise ValueError("--steps and --epochs: give one of them")
    if options["steps"] is None:
        # Of epochs the steps are counted when the rows are read.
        settings["steps"] = STEPS if options["epochs"] is None else options["warmup_steps"] + 1
    settings["processes"] = world_size()
    settings["packing"] = not options["no_packing"]
    for name in ("output_dir", "base_model"):
        settings[name] = _without_tilde(options[name])
    settings["data_files"] = [_without_tilde(file) for file in options["data_files"] or []]
    settings["add_tokens"] = options["add_tokens"] or []
    settings["seq_len"] = _tokens(options["seq_len"])
    if options["precision"] is None:
        names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
        settings["precision"] = names[machine().compute_dtype]
    if options["learning_rate"] is None:
        # Adapters start at zero, and take larger steps than weights that know something already.
        settings["learning_rate"] = 1e-4 if options["method"] == "full" else 3e-4
    # A run that is tried for a few steps would end before its learning rate is reached.
    if options["warmup_steps"] >= settings["steps"]:
        settings["warmup_steps"] = 0
    return Settings(**settings)


def _tokens(text: str) -> int:
    """What --seq-len says."""
    if text == AUTO:
        return REPLACED
    if not text.isdecimal():
        raise ValueError(f"--seq-len {text}: give a number of tokens, or {AUTO}")
    return int(text)


def _without_tilde(path: str) -> str:
    """The shell expands a `~` at the start of a word only, not in --output=~/runs."""
    return os.path.expanduser(path)
